"""What each side of :mod:`rivals` is given to train, and the clock that it shows every step to."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from _held_clocks import standing
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

LR = 1e-3  # of AdamW, on every side


class OverTimeError(Exception):
    """A run has had its time."""


class Clock:
    """When each step was over, in seconds since :meth:`start`, and its loss.

    Args:
        device: ``"cpu"`` or ``"cuda"``, which is waited for at ``marks``.
        marks: Numbers of steps.
        limit_s: After so many seconds a step raises :class:`OverTimeError`.
        turn: After every so many steps the process hands its turn over, and waits. If 0, it never does.
    """

    def __init__(self, device: str, marks: list[int], limit_s: float, turn: int) -> None:
        self.at_s: list[float] = []
        self._losses: list[Tensor] = []
        self._waits = set(marks) if device == "cuda" else set()
        self._limit_s, self._turn = limit_s, turn

    def start(self) -> None:
        self._began = time.perf_counter()

    def step(self, loss: Tensor) -> None:
        """To be called when a step's last work was given to the device."""
        self._losses.append(loss.detach().clone())  # a compiled graph writes the next one where this one is
        if len(self._losses) in self._waits:
            torch.cuda.synchronize()
        self.at_s.append(time.perf_counter() - self._began)
        if self.is_over:
            raise OverTimeError
        if self._turn and len(self.at_s) % self._turn == 0:
            with standing():
                print("\nturn", flush=True)
                sys.stdin.readline()

    @property
    def is_over(self) -> bool:
        return bool(self.at_s) and self.at_s[-1] > self._limit_s

    def losses(self) -> list[float]:
        return [float(loss) for loss in self._losses]


class Ready(Dataset[Any]):
    """Batches that are there already, again and again.

    Args:
        batches: Of inputs and labels.
        steps: So many in all.
        names: Of the two, for programs whose batches are dicts.
    """

    def __init__(self, batches: list[tuple[Tensor, Tensor]], steps: int, names: tuple[str, ...] = ()) -> None:
        self._batches, self._steps, self._names = batches, steps, names

    def __len__(self) -> int:
        return self._steps

    def __getitem__(self, index: int) -> Any:
        batch = self._batches[index % len(self._batches)]
        return dict(zip(self._names, batch, strict=True)) if self._names else batch


def prepare_by_hand(net: nn.Module, device: str) -> bool:
    """Makes of a model what the guides recommend. Returns whether it takes images, which are to be in channels_last."""
    if device == "cuda":
        torch.set_float32_matmul_precision("high")
    for module in net.modules():
        if hasattr(module, "is_fused"):
            module.is_fused = True
    takes_images = any(isinstance(module, nn.Conv2d) for module in net.modules())
    if takes_images:
        net.to(memory_format=torch.channels_last)
    return takes_images


@dataclass(frozen=True, kw_only=True)
class Training:
    """A side trains ``net`` on all batches of ``loader`` with AdamW, and shows every step to the clock.

    Attributes:
        net: With its first weights, on the CPU.
        loss: Of its logits and the labels.
        batches: Of inputs and labels, on the CPU.
        steps: In all.
        device: ``"cpu"`` or ``"cuda"``.
        has_bf16: Whether the device is faster in bfloat16.
        folder: For what a program writes.
        notes: For what it has to tell.
    """

    net: nn.Module
    loss: Callable[[Tensor, Tensor], Tensor]
    batches: list[tuple[Tensor, Tensor]]
    steps: int
    device: str
    has_bf16: bool
    folder: Path
    clock: Clock
    notes: dict[str, str] = field(default_factory=dict)

    def loader(self, *names: str, pinned: bool = False) -> DataLoader[Any]:
        return DataLoader(Ready(self.batches, self.steps, names), batch_size=None, pin_memory=pinned)

    def optimizer(self, **options: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.net.parameters(), lr=LR, **options)
