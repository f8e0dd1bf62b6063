"""What the tests of checkpointing share: checkpointing alone, blocks to checkpoint, and some steps of training."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_accel.assembly import AcceleratedModel, accelerate
from lightning_accel.settings import Plan

MODES = ["full", "selective"]

# What is refused everywhere though it was asked for is said as a warning too; tests/test_engine.py holds that.
IN_FORCE_NOWHERE = pytest.mark.filterwarnings("ignore:.* is not in force anywhere")


def checkpointed(
    model: nn.Module, mode: str = "full", blocks: list[str] | None = None, **settings: Any
) -> AcceleratedModel:
    setting: Any = {"mode": mode, "blocks": blocks} if blocks else mode
    host = settings.pop("host", None)
    quiet: dict[str, Any] = {"precision": "32-true", "memory_format": "off", "inplace_activations": False}
    quiet["flash_attention"] = "off"  # whose trial goes by the clock
    return accelerate(model, Plan().replace(**{**quiet, **settings}, gradient_checkpointing=setting), host=host)


class Base(nn.Module):
    """A block of one linear layer and dropout; its kin differ in what they take and return."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.5)

    def inner(self, x: Tensor) -> Tensor:
        return x + self.dropout(F.gelu(self.linear(x)))

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)


class Counting(Base):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def inner(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().inner(x)


class Normed(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.linear(x))


class Chain(nn.Module):
    """Blocks one after the other, called as ``call`` calls one."""

    def __init__(self, kind: type[nn.Module], call: Callable[[nn.Module, Tensor], Tensor], times: int = 1) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(kind() for _ in range(2))
        self.call = call
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for _ in range(self.times):
            for block in self.blocks:
                x = self.call(block, x)
        return x


def trained(model: nn.Module, handle: AcceleratedModel | None, steps: int = 3) -> dict[str, Tensor]:
    """Weights and buffers after some steps, and the random number drawn next."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1)
    for step in range(steps):
        x = torch.randn(5, 8, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        with handle.step() if handle else nullcontext():
            loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
    return {**copy.deepcopy(model.state_dict()), "next random": torch.rand(1)}
