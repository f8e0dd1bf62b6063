"""Finds training steps that take several times as long as others, without waiting for the device."""

from __future__ import annotations

import statistics
from collections import deque

from lightning_accel.core.step_timeline import Driver, StepTimeline, StepTimes
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

    def __init__(self, timeline: StepTimeline) -> None:
        self._timeline = timeline
        timeline.listeners.append(self._took)
        timeline.is_watched = True
        self._ms: deque[float] = deque(maxlen=_WINDOW)
        self._found: str | None = None
        self._was_paused = True

    def close(self) -> None:
        """Listens no more."""
        self._timeline.is_watched = False
        self._timeline.forget(self._took)
        self._timeline.release(self)

    def pause(self) -> None:
        """Tells that something else than training comes next: the step in which it ends is not looked at."""
        self._timeline.pause()
        self._was_paused = True

    def step_begins(self, number: int) -> None:
        """Told before each step."""
        if not self._was_paused:
            self._timeline.labels[self] = number

    def step_ended(self) -> str | None:
        """Told after each step. Returns in words what was slow, or None if nothing was."""
        self._was_paused = False
        if self._timeline.claim(self, Driver.TRACES):
            self._timeline.steps_ended(1)
        found, self._found = self._found, None
        return found

    def _took(self, step: StepTimes) -> None:
        ms, number = step.cycle_ms, step.labels.get(self)
        if number is None:
            return
        if len(self._ms) >= FEWEST and ms > FACTOR * (median := statistics.median(self._ms)):
            self._found = f"step {number} took {duration(ms)}, the median is {duration(median)}"
        self._ms.append(ms)
