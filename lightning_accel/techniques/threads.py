"""The number of threads that one operation may use on the host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, ClassVar, Literal

import torch
from torch import nn
from typing_extensions import Self, override

from lightning_accel.core.host import Host
from lightning_accel.core.options import Rule
from lightning_accel.core.patch import Patch
from lightning_accel.techniques.arms import OFF, Arm
from lightning_accel.techniques.base import BuildContext, Forecast, Technique
from lightning_accel.techniques.registry import register


def in_words(count: int) -> str:
    """What that number means."""
    return f"{count} {'thread' if count == 1 else 'threads'} an operation"


class ThreadsPatch(Patch):
    """Sets the number of threads of this process; undone where nobody else has set another since."""

    def __init__(self, count: int, change: str) -> None:
        super().__init__("", change)
        self._count = count

    @override
    def _apply(self) -> None:
        self._before = torch.get_num_threads()
        torch.set_num_threads(self._count)

    def choose(self, choice: str) -> None:
        """Has another number in force, or the user's own."""
        self.undo()
        if choice != OFF:
            self._count = int(choice)
            self.apply()

    @override
    def _undo(self) -> None:
        if torch.get_num_threads() == self._count:
            torch.set_num_threads(self._before)


# Before a compiler, whose kernels are made for the threads that there are.
@register(
    "threads",
    options=Literal["auto", "off"] | Annotated[int, Rule("a number from 1 on", lambda name, value: value >= 1)],
    default="off",
    doc=(
        '``"off"`` leaves them as they are; a number from 1 on; or ``"auto"``: half as many, a quarter and so '
        "on are tried on the run's own steps, and the fastest stays. ``lightning-accel tune`` finds it before "
        "a run."
    ),
    before="compile",
    exactness="rounding",
)
class Threads(Technique):
    """Has torch use as many threads as it is told, while the run lasts. Sums may be rounded in another order."""

    applied_before_trial = True
    trial_step: ClassVar[None] = None
    remembers = False
    not_on: ClassVar[Mapping[str, str]] = {
        "xla": "XLA computes with threads of its own, of which torch's setting says nothing"
    }

    def __init__(self, count: Literal["auto"] | int) -> None:
        # Fewer than there are: all of them is what the run has without this.
        fewer = [str(torch.get_num_threads() >> halved) for halved in range(1, torch.get_num_threads().bit_length())]
        self._choices = tuple(fewer) if count == "auto" else ()
        self._count = count
        self._patch: ThreadsPatch | None = None

    @classmethod
    @override
    def from_settings(cls, settings: Literal["auto", "off"] | int, context: BuildContext) -> Self:
        assert settings != "off"
        return cls(settings)

    @override
    def patches(self, model: nn.Module, host: Host) -> Iterator[Patch]:
        if self._count != "auto":
            self._patch = ThreadsPatch(self._count, in_words(self._count))
        elif self._choices:
            self._patch = ThreadsPatch(torch.get_num_threads(), f"{', '.join(self._choices)} on trial")
            self.notes.status = f"all {torch.get_num_threads()} threads, until live trials find fewer to be faster"
        if self._patch is not None:
            yield self._patch

    @override
    def arms(self) -> Iterator[Arm]:
        if self._patch is not None and self._choices:
            yield Arm(self.name, self._choices, self._choose, starts_off=True, asked_alone=True)

    def _choose(self, choice: str) -> None:
        assert self._patch is not None
        self._patch.choose(choice)
        self.notes.status = in_words(torch.get_num_threads())

    @override
    def forecast(self, host: Host) -> Forecast:
        if (reason := self.unavailable(host)) is not None:
            return Forecast(False, "no", reason)
        if self._count == "auto":
            return Forecast(True, "tried", "fewer are tried")
        return Forecast(True, "yes", in_words(self._count))
