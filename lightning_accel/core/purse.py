"""The purse: the seconds that a run may spend on overhead, that is on all but the user's own steps, and has spent."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lightning_accel.core.clocks import seconds

SHARE = 0.02
"""The share of the expected time of the run that may be spent."""

FIRST_SHARE, FIRST_STEPS = 0.05, 100
"""The largest share of the time of the steps so far: a run may end earlier than expected."""

BEFORE_FIRST_STEP_S = 0.1
"""What may be spent while the time of a step is not known."""

TRIALS = "trials of parts"
_TRIFLE_S = 5e-4
_LOOKED_AT = 15  # the latest plain steps: their median is the time of a step


class Purse:
    """The budget of one run, in seconds. Whoever causes overhead asks :meth:`can_pay` before, and pays after.

    Args:
        clock: Gives seconds.

    Attributes:
        steps: How many steps the run will have in all, about; infinite where it does not end by itself.
        done: How many of them are over.
        steps_a_turn: How many of them there are from one step of the optimizer to the next.
        spent_s: What was paid for → seconds.
        earned_s: What steps have taken less than plain ones, by what was paid for; it may be spent again.
    """

    def __init__(self, clock: Callable[[], float] = seconds) -> None:
        self.steps = math.inf
        self.done = 0
        self.steps_a_turn = 1
        self.spent_s: defaultdict[str, float] = defaultdict(float)
        self.earned_s = 0.0
        self._clock = clock
        self._plain_s: list[float] = []
        self._payer: list[float] = []  # what those who pay within another's payment have paid, one for each of these

    @property
    def step_s(self) -> float | None:
        """What a step takes as the user wrote it; None while none is over.

        Of few steps it is the fastest: what slows the first ones down is no reason to spend more.
        """
        if not self._plain_s:
            return None
        return statistics.median(self._plain_s) if len(self._plain_s) == _LOOKED_AT else min(self._plain_s)

    @property
    def turn_s(self) -> float | None:
        """The time from one step of the optimizer to the next; None while no step is over."""
        return None if self.step_s is None else self.step_s * self.steps_a_turn

    @property
    def left_s(self) -> float:
        """The seconds that may be spent now."""
        spent = sum(self.spent_s.values()) - self.earned_s
        step_s = self.step_s
        if step_s is None:
            return BEFORE_FIRST_STEP_S - spent
        # A run without an end is expected to go on for as long as it has been going.
        steps = self.steps if math.isfinite(self.steps) else 2 * max(self.done, FIRST_STEPS)
        first = FIRST_SHARE * min(max(self.done, FIRST_STEPS), steps)
        return min(SHARE * steps, first) * step_s - spent

    @property
    def total_s(self) -> float:
        """The seconds that the run may spend in all, by its end; 0.0 while no step is over."""
        return SHARE * self.steps * self.step_s if self.step_s else 0.0

    @property
    def to_come_s(self) -> float:
        """The seconds that the run may still spend until its end."""
        return self.total_s + self.earned_s - sum(self.spent_s.values())

    def can_pay(self, seconds: float) -> bool:
        """Whether so many seconds may be spent now."""
        return seconds <= self.left_s

    def step_took(self, seconds: float) -> None:
        """Takes the time of a plain step into account."""
        self._plain_s.append(seconds)
        del self._plain_s[:-_LOOKED_AT]

    def pay(self, what: str, seconds: float) -> None:
        """Records seconds that were spent on something."""
        self.spent_s[what] += seconds

    def earn(self, seconds: float) -> None:
        """Adds what faster steps have saved. To spend that again does not make a run slower than plain."""
        self.earned_s += seconds

    @contextmanager
    def paying(self, what: str) -> Iterator[None]:
        """Pays for the time inside the context, less what others pay for in it."""
        self._payer.append(0.0)
        began = self._clock()
        try:
            yield
        finally:
            took = self._clock() - began
            others = self._payer.pop()
            self.pay(what, max(0.0, took - others))
            if self._payer:
                self._payer[-1] += took

    def line(self) -> str:
        """What was spent on what, for the report; empty if nothing was spent."""
        spent = sorted(self.spent_s.items(), key=lambda item: -item[1])
        words = [f"{what} {seconds:.3g} s" for what, seconds in spent if seconds >= _TRIFLE_S]
        return f"{sum(self.spent_s.values()):.3g} s ({', '.join(words)})" if words else ""
