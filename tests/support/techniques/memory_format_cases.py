"""What the tests of memory formats share: channels_last alone, a training step, and a module that it slows down."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_accel.assembly import AcceleratedModel, accelerate
from lightning_accel.experiment.trial import NumbersComparison, Trial
from lightning_accel.settings import Plan

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}

# What is refused everywhere though it was asked for is said as a warning too; tests/test_engine.py holds that.
IN_FORCE_NOWHERE = pytest.mark.filterwarnings("ignore:.* is not in force anywhere")


def laid_out(model: nn.Module, setting: str = "channels_last", **settings: Any) -> AcceleratedModel:
    quiet: dict[str, Any] = {"precision": "32-true", "inplace_activations": False, "memory_format": setting}
    return accelerate(model, Plan().replace(**{**quiet, **settings}))


def is_channels_last(tensor: Tensor) -> bool:
    return tensor.is_contiguous(memory_format=FORMATS[tensor.dim()]) and not tensor.is_contiguous()


def step(
    model: nn.Module, handle: AcceleratedModel | None, inputs: Any, call: Callable[..., Tensor] | None = None
) -> Tensor:
    """One training step without an optimizer; the loss."""
    model.zero_grad()
    with handle.step() if handle else nullcontext():
        outputs = (call or model)(handle.batch(inputs) if handle else inputs)
        loss = outputs.square().mean()
    loss.backward()
    return loss.detach()


def assert_same_step(model: nn.Module, handle: AcceleratedModel, plain: nn.Module, inputs: Any) -> None:
    torch.testing.assert_close(step(model, handle, inputs), step(plain, None, inputs))
    torch.testing.assert_close(
        [p.grad for p in model.parameters()], [p.grad for p in plain.parameters()], rtol=1e-4, atol=1e-6
    )
    torch.testing.assert_close(model.state_dict(), plain.state_dict())


def clock(monkeypatch: pytest.MonkeyPatch, speed: float) -> None:
    """Lets every trial find channels_last ``speed`` times as fast, whatever this machine is doing."""

    def time(self: Trial, original: Any, candidate: Any) -> NumbersComparison:
        return NumbersComparison(original_ms=10.0, candidate_ms=10.0 / speed)

    monkeypatch.setattr(Trial, "time", time)
