"""The purse: the seconds of overhead (all but the user's own steps) that a run may spend and has spent."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lightning_accel.core.clocks import seconds

SHARE = 0.02
"""The share of the run's expected time that may be spent."""

FIRST_SHARE, FIRST_STEPS = 0.05, 100
"""The largest share of the steps so far, counted as at least FIRST_STEPS: a run may end earlier than expected."""

BEFORE_FIRST_STEP_S = 0.1
"""The seconds that may be spent while the time of a step is unknown."""

TRIALS = "trials of parts"
_TRIFLE_S = 5e-4
_LOOKED_AT = 15  # number of latest plain steps; their median is the time of a step


class Purse:
    """The overhead budget of one run, in seconds. Call :meth:`can_pay` before causing overhead and :meth:`pay` after.

    Args:
        clock: Returns seconds.

    Attributes:
        steps: The approximate number of steps in the whole run; infinite if it has no end.
        done: How many of them are over.
        steps_a_turn: The number of steps from one optimizer step to the next.
        step_s: The seconds of a plain step, as the user wrote it; None until one is over. Of only a few steps the
            fastest counts: slow first steps must not raise the budget.
        spent_s: Purpose → seconds spent.
        earned_s: Seconds that faster steps have saved compared with plain ones. They may be spent again.
        saved_share: The share of a plain step that the steps now in force save, as they were measured.
        owed_s: Technique → the seconds of its trial, if the run could not pay for it, or for all of it.
    """

    def __init__(self, clock: Callable[[], float] = seconds) -> None:
        self.steps = math.inf
        self.done = 0
        self.steps_a_turn = 1
        self.spent_s: defaultdict[str, float] = defaultdict(float)
        self.earned_s = self.saved_share = 0.0
        self.owed_s: dict[str, float] = {}
        self._clock = clock
        self._plain_s: list[float] = []
        self.step_s: float | None = None
        self._payer: list[float] = []  # for each open payment, the seconds paid inside it

    @property
    def turn_s(self) -> float | None:
        """The seconds from one optimizer step to the next; None until a step is over."""
        return None if self.step_s is None else self.step_s * self.steps_a_turn

    @property
    def left_s(self) -> float:
        """The seconds that may be spent now."""
        spent = sum(self.spent_s.values()) - self.earned_s
        step_s = self.step_s
        if step_s is None:
            return BEFORE_FIRST_STEP_S - spent
        # A run without an end is assumed to be half over.
        steps = self.steps if math.isfinite(self.steps) else 2 * max(self.done, FIRST_STEPS)
        first = FIRST_SHARE * min(max(self.done, FIRST_STEPS), steps)
        # Proven steps will save more. Half of that may be spent before, within the share of the steps so far.
        ahead = self.saved_share * max(0, steps - self.done) / 2
        return (min(SHARE * steps, first) + min(ahead, first)) * step_s - spent

    @property
    def total_s(self) -> float:
        """The seconds that the run may spend in total, by its end; 0.0 until a step is over."""
        return SHARE * self.steps * self.step_s if self.step_s else 0.0

    @property
    def to_come_s(self) -> float:
        """The seconds that the run may still spend until its end."""
        ahead = self.saved_share * max(0, self.steps - self.done) if self.saved_share else 0.0  # a run may have no end
        return self.total_s + self.earned_s + ahead * (self.step_s or 0.0) - sum(self.spent_s.values())

    def can_pay(self, seconds: float) -> bool:
        """Returns whether this many seconds may be spent now."""
        return seconds <= self.left_s

    def step_took(self, seconds: float) -> None:
        """Records the time of a plain step; not if no time is left of it without what was paid for in it."""
        if seconds <= 0:
            return
        self._plain_s.append(seconds)
        del self._plain_s[:-_LOOKED_AT]
        is_sure = len(self._plain_s) == _LOOKED_AT
        self.step_s = statistics.median(self._plain_s) if is_sure else min(self._plain_s)

    def pay(self, what: str, seconds: float) -> None:
        self.spent_s[what] += seconds

    @contextmanager
    def paying(self, what: str) -> Iterator[None]:
        """Pays for the time inside the context, without what nested payments cover."""
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
        """Returns what was spent on what, for the report; empty if nothing was spent."""
        spent = sorted(self.spent_s.items(), key=lambda item: -item[1])
        words = [f"{what} {seconds:.3g} s" for what, seconds in spent if seconds >= _TRIFLE_S]
        return f"{sum(self.spent_s.values()):.3g} s ({', '.join(words)})" if words else ""
