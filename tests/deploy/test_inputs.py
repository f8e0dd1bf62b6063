"""What of a loader's batch a model is called with, and what is the target."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from lightning_accel.deploy.inputs import inputs_and_targets


def with_forward(forward: Callable[..., Any]) -> nn.Module:
    model = nn.Module()
    model.forward = forward  # type: ignore[method-assign]
    return model


ONE = with_forward(lambda x: x)
TWO = with_forward(lambda x, y: x)
OPTIONAL = with_forward(lambda x, mask=None: x)
NAMED = with_forward(lambda ids, mask=None, labels=None: ids)
ANY = with_forward(lambda **batch: batch)


@pytest.mark.parametrize(
    ("model", "batch", "inputs", "targets"),
    [
        (ONE, "x", "x", None),
        (ONE, ["x"], "x", None),
        (ONE, ("x", "target"), "x", "target"),
        (ONE, ("x", "weight", "target"), "x", "target"),
        (TWO, ("x", "y", "target"), ("x", "y"), "target"),
        (TWO, ("x", "y"), ("x", "y"), None),
        (TWO, (("x", "y"), "target"), ("x", "y"), "target"),
        (OPTIONAL, ("x", "target"), "x", "target"),
        (NAMED, {"ids": 1, "mask": 2, "labels": 3}, {"ids": 1, "mask": 2}, 3),
        (NAMED, {"ids": 1, "mask": 2, "y": 3}, {"ids": 1, "mask": 2}, 3),
        (ONE, {"ids": 1, "mask": 2}, {"ids": 1, "mask": 2}, None),
        (ANY, {"ids": 1, "y": 3}, {"ids": 1, "y": 3}, None),
    ],
)
def test_a_batch_is_what_forward_needs_and_then_the_target(
    model: nn.Module, batch: Any, inputs: Any, targets: Any
) -> None:
    assert inputs_and_targets(model, batch) == (inputs, targets)
