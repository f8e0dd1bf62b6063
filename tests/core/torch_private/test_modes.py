"""What breaks when a torch drops one of the private names of modes, in plain words: a test a name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_accel.core.torch_private.modes import (
    DispatchMode,
    has_modes,
    without_dispatch_modes,
    without_function_modes,
)


class Sees(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


class SeesKernels(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [Sees, SeesKernels])
def test_modes_that_see_every_operation_are_noticed(mode: type[Sees | SeesKernels]) -> None:
    """Else Dynamo gives attention under a FLOP counter up for good, and the counter meets overwritten inputs."""
    assert not has_modes()
    with mode():
        assert has_modes()


def test_a_dispatch_mode_sees_operations_and_nobody_does_without_modes() -> None:
    """Else no FLOPs could be counted; and whoever counts them in a run would count those of its trials."""

    class Seeing(DispatchMode):
        operations = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Tensor:
            self.operations += 1
            return func(*args, **(kwargs or {}))

    x = torch.zeros(2)
    with Seeing() as seeing:
        with without_dispatch_modes():
            x + 1
        assert seeing.operations == 0
        x + 1
        assert seeing.operations == 1


def test_function_modes_step_aside_and_come_back_in_their_order() -> None:
    """Else what is captured inside them is captured anew at every call, or the modes see it no more."""
    ones = torch.ones(2)
    with Sees() as outer, Sees() as inner:
        with without_function_modes() as modes:
            assert modes == [outer, inner]
            ones.abs()
        assert not inner.seen
        ones.abs()
    assert len(inner.seen) == len(outer.seen) == 1
    assert not has_modes()
