"""What operations have to do, noted one by one and put together where it is alike."""

from __future__ import annotations

import torch
from torch import nn

from lightning_accel.evidence.roofline import ToDo
from lightning_accel.evidence.step_breakdown import OperationsAlike

MODEL = nn.Linear(8, 4)
WEIGHT, SAMPLES = torch.ones(4, 8), torch.ones(16, 8)


def noted(*names: str, flops: int = 0, written: torch.Tensor = SAMPLES, moved_bytes: int = 1000) -> OperationsAlike:
    """Of operations that took a millisecond each."""
    to_do = ToDo(MODEL)
    for name in names:
        to_do.note(name, [written], moved_bytes)
        if flops:
            to_do.counted(flops)
    (found,) = to_do.alike([1.0] * len(names), [True] * len(names))
    return found


def test_operations_with_as_much_to_do_are_told_together() -> None:
    assert noted("relu", "gelu") == OperationsAlike(count=2, ms=2.0, moved_bytes=2000)


def test_those_with_more_to_do_are_told_apart() -> None:
    to_do = ToDo(MODEL)
    for moved_bytes in (1000, 3000):
        to_do.note("relu", [SAMPLES], moved_bytes)
    assert [one.moved_bytes for one in to_do.alike([1.0, 1.0], [True, True])] == [1000, 3000]


def test_of_products_flops_count_as_the_weights_that_they_read_do_not_grow_with_the_batch() -> None:
    assert noted("addmm", flops=512) == OperationsAlike(count=1, ms=1.0, flops=512)


def test_casts_of_weights_and_of_their_gradients_do_not_grow_with_the_batch() -> None:
    assert noted("to_copy", written=WEIGHT).moved_bytes == 0
    assert noted("to_copy", written=WEIGHT.T).moved_bytes == 0
    assert noted("to_copy").moved_bytes == 1000


def test_those_that_are_not_chosen_are_left_out() -> None:
    to_do = ToDo(MODEL)
    for moved_bytes in (1000, 1000):
        to_do.note("relu", [SAMPLES], moved_bytes)
    assert to_do.alike([1.0, 5.0], [True, False]) == [OperationsAlike(count=1, ms=1.0, moved_bytes=1000)]
