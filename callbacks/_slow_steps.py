"""Finds training steps that take several times as long as others, without waiting for the device."""

from __future__ import annotations

import statistics
from collections import deque
from typing import Any

from lightning_accel.core.clocks import StepClock
from lightning_accel.evidence.speed import duration

FACTOR = 3.0
"""So many times the median is slow."""

FEWEST = 16
"""Of so many steps there is a median. The first ones, in which caches fill and changes are tried, are long anyway."""

_WINDOW = 64


class SlowSteps:
    """Compares each step, from the end of the one before to its own, with the median of those before it.

    On a GPU it is the device's time, which is known some steps later.
    """

    def __init__(self, clock: StepClock) -> None:
        self._clock = clock
        self._last: Any = None  # the mark at the end of the latest step
        self._pending: deque[tuple[int, Any, Any]] = deque()
        self._ms: deque[float] = deque(maxlen=_WINDOW)

    def pause(self) -> None:
        """Something else than training comes next: the step in which it ends is not looked at."""
        self._last = None

    def step_ended(self, number: int) -> str | None:
        """Told after each step. What was slow, in words; None: nothing so far."""
        mark = self._clock.mark()
        if self._last is not None:
            self._pending.append((number, self._last, mark))
        self._last = mark
        found = None
        while self._pending and self._clock.has_passed(self._pending[0][2]):
            number, began, ended = self._pending.popleft()
            found = self._judged(number, self._clock.ms_between(began, ended)) or found
        return found

    def _judged(self, number: int, ms: float) -> str | None:
        median = statistics.median(self._ms) if len(self._ms) >= FEWEST else None
        self._ms.append(ms)
        if median is None or ms <= FACTOR * median:
            return None
        return f"step {number} took {duration(ms)}, the median is {duration(median)}"
