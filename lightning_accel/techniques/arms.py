"""What live trials may switch between two training steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

OFF = "off"


class ArmSetup(Protocol):
    """What an arm needs once, in a training step of the run, before it can be had: to be compiled, say.

    Live trials ask what it will take, and begin it where the run may lose as much; that step is not counted.
    """

    def expected_s(self) -> float:
        """How long it will take, in seconds, as far as is known."""

    def begin(self, may_take_s: float) -> None:
        """Called between two steps, before the arm is chosen: the step that follows does it, in so many seconds."""

    def end(self) -> float | None:
        """Called after that step, on all ranks: what it took, in seconds; None: the arm cannot be had after all."""

    def decline(self, reason: str) -> None:
        """Called where it is not worth its time in this run."""


@dataclass(frozen=True)
class Arm:
    """One thing of a technique that can be had in several ways, each of which trains the same."""

    name: str  # the technique's, in the report and in what is remembered
    choices: tuple[str, ...]  # beside "off", the user's own code; the first is what the technique would have by itself
    choose: Callable[[str], None]  # puts a choice, or "off", in force from the next step on; called between steps only
    settle: int = 0  # steps after a switch that pay for it (layouts, caches); they are not counted
    settle_of: Mapping[str, int] = field(default_factory=dict)  # of choices that take more of them, to and from
    has: Callable[[str], bool] = lambda choice: True  # whether a choice can be had; asked before it is compared
    saves_memory: bool = False  # whether it is there to save memory: it stays unless the run is slower with it
    gain_ms: float | None = None  # in a step, at most, by the trial of its parts; None where nothing was timed
    starts_off: bool = False  # whether it is off until live trials put it on: not had in a run too short for them
    asked_alone: bool = False  # whether it is no part of the whole plan that is asked about first: it mostly loses
    setup: ArmSetup | None = None  # what it needs once; such an arm is off until it is asked for, after all the others
