"""Finds training steps that take several times as long as others, without waiting for the device."""

from __future__ import annotations

import statistics
from collections import deque

from lightning_accel.core.clocks import HostClock
from lightning_accel.core.step_timeline import StepTimeline, StepTimes
from lightning_accel.evidence.amounts import duration

FACTOR = 3.0
"""So many times the median is slow."""

FEWEST = 16
"""Of so many steps there is a median. The first ones, in which caches fill and changes are tried, are long anyway."""

_WINDOW = 64


class SlowSteps:
    """Compares each step, from the end of the one before to its own, with the median of those before it.

    On a GPU it is the device's time, which is known some steps later.
    """

    def __init__(self, clock: HostClock) -> None:
        self._timeline = StepTimeline(clock, self._took)
        self._ms: deque[float] = deque(maxlen=_WINDOW)
        self._found: str | None = None

    def pause(self) -> None:
        """Tells that something else than training comes next: the step in which it ends is not looked at."""
        self._timeline.pause()

    def step_ended(self, number: int) -> str | None:
        """Told after each step. Returns in words what was slow, or None if nothing was."""
        self._found = None
        self._timeline.steps_ended(1, label=number)
        return self._found

    def _took(self, step: StepTimes) -> None:
        ms = step.cycle_ms
        if len(self._ms) >= FEWEST and ms > FACTOR * (median := statistics.median(self._ms)):
            self._found = f"step {step.label} took {duration(ms)}, the median is {duration(median)}"
        self._ms.append(ms)
