"""Models, training steps and a clock for the tests of flash attention as a technique."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_accel import Plan, accelerate
from lightning_accel.assembly import AcceleratedModel
from lightning_accel.experiment.trial import NumbersComparison, Trial
from lightning_accel.techniques.flash_attention.dispatch import Dispatch
from lightning_accel.techniques.flash_attention.technique import FlashAttention
from support.attention_zoo import FOUND

ALONE: dict[str, Any] = {"precision": "32-true", "memory_format": "off", "inplace_activations": False}


class Stack(nn.Module):
    """Layers of one kind with a residual around each: (B, T, 32) → (B, T, 32)."""

    def __init__(self, kind: type[nn.Module], depth: int = 2, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(kind(**options) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            out = layer(x)
            x = x + (out[0] if isinstance(out, tuple) else out)
        return x


class Layer(nn.Module):
    """A block with an MLP, so that there is more around attention than attention."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = FOUND["causal_buffer"]()
        self.mlp = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.attention(x))


class Discards(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 4, dropout=dropout, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.attention(x, x, x)
        return out


def start(model: nn.Module, setting: Any = "sdpa", **settings: Any) -> AcceleratedModel:
    return accelerate(model, Plan().replace(**{**ALONE, "flash_attention": setting, **settings}))


def step(model: nn.Module, handle: AcceleratedModel | None, x: Tensor) -> list[Tensor]:
    """The loss and the gradients of one training step."""
    model.zero_grad()
    if handle is None:
        loss = model(x).square().mean()
    else:
        with handle.step():
            loss = model(x).square().mean()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def batch(size: int = 4, length: int = 16) -> Tensor:
    return torch.randn(size, length, 32)


def dispatches(handle: AcceleratedModel) -> dict[str, Dispatch]:
    technique = handle.engine.technique(FlashAttention)
    assert technique is not None
    return technique._dispatches


def choices(handle: AcceleratedModel, site: str = "layers.0") -> dict[str, str]:
    return dispatches(handle)[site].choices


def clock(monkeypatch: pytest.MonkeyPatch, speed: float) -> list[Trial]:
    """Lets every trial find the candidate ``speed`` times as fast, whatever this machine is doing."""
    timed: list[Trial] = []

    def time(self: Trial, original: Any, candidate: Any) -> NumbersComparison:
        timed.append(self)
        return NumbersComparison(original_ms=10.0, candidate_ms=10.0 / speed)

    monkeypatch.setattr(Trial, "time", time)
    return timed
