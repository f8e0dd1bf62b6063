"""What operations have to do, put together where it is alike."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lightning_accel.evidence.roofline import Operation, alike, is_of_weight, weight_shapes
from lightning_accel.evidence.step_breakdown import ModuleCost, OperationsAlike

WEIGHTS = weight_shapes(nn.Linear(8, 4))
WEIGHT, SAMPLES = torch.ones(4, 8), torch.ones(16, 8)


def operation(growing_bytes: int = 1000, **values: Any) -> Operation:
    """That took a millisecond."""
    return Operation(ModuleCost(module="", kind=""), growing_bytes=growing_bytes, ms=1.0, **values)


def test_operations_with_as_much_to_do_are_told_together() -> None:
    assert alike([operation(), operation()]) == [OperationsAlike(count=2, ms=2.0, moved_bytes=2000)]


def test_those_with_more_to_do_are_told_apart() -> None:
    assert [one.moved_bytes for one in alike([operation(1000), operation(3000)])] == [1000, 3000]


def test_of_products_flops_count_as_the_weights_that_they_read_do_not_grow_with_the_batch() -> None:
    assert alike([operation(flops=512)]) == [OperationsAlike(count=1, ms=1.0, flops=512)]


def test_casts_of_weights_and_of_their_gradients_do_not_grow_with_the_batch() -> None:
    assert is_of_weight("to_copy", [WEIGHT], WEIGHTS)
    assert is_of_weight("to_copy", [WEIGHT.T], WEIGHTS)
    assert not is_of_weight("to_copy", [SAMPLES], WEIGHTS)
    assert not is_of_weight("relu", [WEIGHT], WEIGHTS)
