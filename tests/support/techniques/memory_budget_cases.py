"""What the tests of memory budgets share: a stack of blocks, a loop that trains it, and the peak of a plain step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_accel import MemorySchedule, Plan, accelerate
from lightning_accel.assembly import AcceleratedModel
from lightning_accel.core.optimizers import state_of
from lightning_accel.memory.meter import meter_for
from lightning_accel.memory.schedule import FixedMemory

SETTLED = 10  # steps after which a plan is found, measured and timed
PLAIN: dict[str, Any] = {
    "precision": "32-true",
    "flash_attention": "off",
    "memory_format": "off",
    "inplace_activations": False,
    "optimizer": "off",  # whose steps are equal to rounding only
}


class Block(nn.Module):
    """Keeps eleven times its input for the backward pass, in float32: (B, D) → (B, D)."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self, blocks: int = 6, width: int = 32) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


_handles: list[AcceleratedModel] = []


@pytest.fixture(autouse=True)
def handles_are_undone() -> Iterator[None]:
    """For modules to import: a step that raised leaves its planner waiting for the next."""
    yield
    while _handles:
        _handles.pop().undo()


class Loop:
    """A plain training loop on a model that is given one batch again and again."""

    def __init__(self, model: nn.Module, budget: Any = None, *, rows: int = 256, **settings: Any) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        checkpointing = {"memory_budget": f"{budget}B" if isinstance(budget, int) else budget} if budget else {}
        self.handle: AcceleratedModel = accelerate(model, Plan().replace(**{**PLAIN, **checkpointing, **settings}))
        _handles.append(self.handle)
        self.rows = rows
        self.data = torch.randn(2048, 32, generator=torch.Generator().manual_seed(0))

    def step(self, rows: int | None = None) -> float:
        with self.handle.step():
            loss = self.model(self.data[: rows or self.rows]).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def run(self, steps: int) -> list[float]:
        return [self.step() for _ in range(steps)]

    def peak_bytes(self) -> int:
        """The peak of one step: what is there before it, and what the allocator hands out on top."""
        return peak_of(self.step, self.model, self.optimizer)

    @property
    def plan(self) -> MemorySchedule:
        plan = self.handle.memory_schedule
        assert plan is not None
        return plan


def peak_of(step: Callable[[], Any], model: nn.Module, optimizer: Optimizer) -> int:
    meter = meter_for(torch.device("cpu"))
    meter.start([*model.parameters(), *model.buffers(), *state_of([optimizer])])
    step()
    return max(interval.peak_bytes for interval in meter.stop())


@pytest.fixture(scope="module")
def plain() -> tuple[int, int]:
    """For modules to import: the peak of a plain step of a stack, and how much of it is not activations."""
    return _plain_step()


@functools.cache
def _plain_step() -> tuple[int, int]:
    loop = Loop(Stack())
    loop.run(2)
    return loop.peak_bytes(), FixedMemory.of(loop.model, [loop.optimizer]).total


def budget(plain: tuple[int, int], share: float) -> int:
    peak, fixed = plain
    return round(fixed + share * (peak - fixed))
