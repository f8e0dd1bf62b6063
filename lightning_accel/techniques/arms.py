"""Arms: the options that live trials may switch between two training steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_accel.core.clocks import Stopwatch

OFF = "off"


class ArmSetup:
    """What an arm needs once, in a training step of the run, before it can be chosen: compilation, for example.

    Live trials ask what it will take, and begin it where the run may lose as much; that step is not counted. Here the
    setup is all that the step does.

    Args:
        run: The technique's :class:`~lightning_accel.techniques.TechniqueContext`.
        expected_s: The estimated time of the setup, in seconds.
    """

    def __init__(self, run: Any, expected_s: float = 0.0) -> None:
        self._run, self._expected_s = run, expected_s
        self._stopwatch = Stopwatch()

    def expected_s(self) -> float:
        """The estimated time of the setup, in seconds."""
        return self._expected_s

    def begin(self, may_take_s: float) -> None:
        """Prepares the setup between two steps. The next step does it, in so many seconds, before the arm is chosen."""
        self._stopwatch = Stopwatch()

    def end(self) -> float | None:
        """Ends the setup after that step, on all ranks. Returns its seconds; None if the arm is not possible."""
        return self._stopwatch.seconds()

    def decline(self, reason: str) -> None:
        """Gives the setup up, since it is not worth its time in this run."""
        self._run.status = reason


@dataclass(frozen=True, kw_only=True)
class Live:
    """How live trials treat a technique: as an arm whose choices are the variants of its sites."""

    variants: tuple[str, ...] = ()  # of a technique that acts without sites, and hears of them by `Switched`
    settle_of: Mapping[str, int] = field(default_factory=dict)  # choices that need more steps to settle than others
    has: Callable[[str], bool] = lambda choice: True  # whether a choice is possible; asked before it is compared
    saves_memory: bool = False  # whether it is meant to save memory: while it does, it stays unless the run is slower
    # The most that it can gain in a turn; asked before it is compared. None: in the next turn it may be known.
    gain_ms: Callable[[], float | None] = lambda: math.inf
    starts_off: bool = False  # whether it is off until live trials put it on; it stays off in a run too short for them
    loses_little: bool = False  # whether it can hardly make steps slower: asked early after a plan that lost
    asked_alone: bool = False  # whether the first question, about the whole plan, leaves it out: it mostly loses
    setup: ArmSetup | None = None  # what it needs once; None if nothing. Such an arm is tried after all the others


@dataclass(frozen=True)
class Arm(Live):
    """An option of a technique with several choices. Each choice trains the same, except for rounding."""

    name: str  # of the technique, in the report and in caches
    choices: tuple[str, ...]  # beside "off", the user's own code; the first is the default
    choose: Callable[[str], None]  # puts a choice, or "off", in force from the next step on
    settle: int = 0  # steps after a switch that are slower for it (layouts, caches) and do not count
