"""The number of threads that one operation may use on the host."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import nn
from typing_extensions import Self, override

from lightning_accel.core.host import Host, usable_cores
from lightning_accel.core.patch import Patch
from lightning_accel.techniques.base import Forecast, Surroundings, Technique
from lightning_accel.techniques.registry import register


@dataclass(frozen=True)
class ThreadsPlan:
    """How many threads an operation uses on the host while a run lasts.

    Attributes:
        count: ``"off"`` leaves them as they are; or a number of threads from 1 on. ``lightning-accel tune`` finds
            the fastest.

    Raises:
        ValueError: It is neither.
    """

    count: Literal["off"] | int = "off"

    def __post_init__(self) -> None:
        is_number = isinstance(self.count, int) and not isinstance(self.count, bool)
        if self.count != "off" and not (is_number and self.count >= 1):
            raise ValueError(
                f"threads={self.count!r} is not possible. Allowed: 'off', or a number from 1 on; this process may use"
                f" {usable_cores()} cores."
            )


def in_words(count: int) -> str:
    """What that number means."""
    return f"{count} {'thread' if count == 1 else 'threads'} an operation"


class ThreadsPatch(Patch):
    """Sets the number of threads of this process; undone where nobody else has set another since."""

    def __init__(self, count: int) -> None:
        super().__init__("", in_words(count))
        self._count = count
        self._before = torch.get_num_threads()

    @override
    def _apply(self) -> None:
        self._before = torch.get_num_threads()
        torch.set_num_threads(self._count)

    @override
    def _undo(self) -> None:
        if torch.get_num_threads() == self._count:
            torch.set_num_threads(self._before)


@register("threads", settings=ThreadsPlan, default="off", exactness="rounding", shown=(1,))
class Threads(Technique):
    """Has torch use as many threads as it is told, while the run lasts. Sums may be rounded in another order."""

    applied_before_trial = True
    trial_step: ClassVar[None] = None
    remembers = False

    def __init__(self, count: int) -> None:
        self._count = count

    @classmethod
    @override
    def planned(cls, settings: ThreadsPlan, surroundings: Surroundings) -> Self:
        assert settings.count != "off"
        return cls(settings.count)

    @override
    def patches(self, model: nn.Module, host: Host) -> Iterator[Patch]:
        yield ThreadsPatch(self._count)

    @override
    def forecast(self, host: Host) -> Forecast:
        return Forecast(True, "yes", in_words(self._count))
