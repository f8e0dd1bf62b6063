"""Times of the steps of a fit that began plain: of plain steps, and the extra time of later ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning_accel.callbacks._fit_timeline import timeline_of
from lightning_accel.core.purse import TRIALS, Purse
from lightning_accel.core.step_timeline import Driver, StepTimes
from lightning_accel.lightning.packages import Trainer

_SLOWER = 0.25  # of a plain step: less may be noise
_TURNS = 3  # that a comparison takes of a slower side, at least


@dataclass
class _Payments:
    """Seconds that the purse had paid when a step began and when it ended."""

    since_s: float
    until_s: float | None = None
    are_charged: bool = False  # the purse pays the step's extra time over a plain step


class PlainSteps:
    """Tells the purse the time of plain steps, and charges it with the extra time of other steps.

    Time that the purse paid for within a step is not part of the step. If no other driver tells the timeline of steps,
    this one does; a step then lasts from one batch to the next.
    """

    def __init__(self, trainer: Trainer, purse: Purse) -> None:
        self._purse, self._timeline = purse, timeline_of(trainer)
        self._timeline.listeners.append(self._took)
        self._payments = _Payments(0.0)
        self._charged_s = 0.0  # extra time of steps that the purse was charged with
        self._extra_s: list[float] = []  # of each of them
        # When an optimizer ended the current step, and what the purse had paid by then.
        self._stepped: tuple[Any, float | None] = None, None
        self.count = 0  # plain steps so far
        self.are_plain = True  # steps still run as the user wrote them

    def batch_comes(self) -> None:
        """Ends the previous step. Time until :meth:`begin` that the purse pays for belongs to no step."""
        paid_s = self._paid_s()
        if self._payments.until_s is None:
            self._payments.until_s = paid_s
        if self._timeline.driver is self:
            self._timeline.step_ended()
        self._payments = _Payments(paid_s)

    def begin(self, *, are_charged: bool) -> None:
        """Begins a step; ``are_charged`` says whether the purse pays its extra time over a plain step."""
        self._payments.are_charged, self._stepped = are_charged, (None, None)
        if not self._timeline.has_begun:  # after a pause, the time until now belongs to no step anyway
            self._payments.since_s = self._paid_s()
        self._timeline.labels[self] = self._payments
        if self._timeline.claim(self, Driver.PLAIN_START):  # another may have released it since the batch came
            self._timeline.step_began()

    def stepped(self) -> None:
        """Notes the end of an optimizer's step. The time after it may be other code's."""
        if self._timeline.driver is self:
            self._stepped = self._timeline.clock.mark(), self._paid_s()

    def interrupt(self) -> None:
        """Ends the current step, since other work than training follows, whose time is not the step's."""
        if self._timeline.driver is self and self._timeline.is_open:
            at, until_s = self._stepped
            self._payments.until_s = self._paid_s() if until_s is None else until_s
            self._timeline.step_ended(at=at)
        self._timeline.pause()
        self._stepped = None, None

    def close(self) -> None:
        """Stops listening to the timeline."""
        if self._timeline.driver is self:
            self._timeline.step_ended()
        self._timeline.forget(self._took)
        self._timeline.release(self)

    @property
    def cannot_be_paid(self) -> bool:
        """Whether steps are so much slower than plain ones that the run cannot pay for a comparison.

        The first one is no sign of that, since it has trials of parts and new kernels.
        """
        step_s, later = self._purse.step_s, self._extra_s[1:]
        if step_s is None or not later or (extra_s := sum(later) / len(later)) < _SLOWER * step_s:
            return False
        return self._purse.to_come_s < _TURNS * self._purse.steps_a_turn * extra_s

    def _took(self, step: StepTimes) -> None:
        payments, now_s = step.labels.get(self), self._paid_s()
        took_s = step.cycle_ms / 1e3
        if payments is not None:
            took_s -= (now_s if payments.until_s is None else payments.until_s) - payments.since_s
        if self.are_plain:
            if self.count and not step.is_apart:  # the first step fills caches
                self._purse.step_took(took_s)
            self.count += step.together or 1
        elif payments is not None and payments.are_charged and self._purse.step_s is not None:
            extra_s = max(0.0, took_s - self._purse.step_s)
            self._charged_s += extra_s
            self._extra_s.append(extra_s)
            self._purse.pay(TRIALS, extra_s)

    def _paid_s(self) -> float:
        return sum(self._purse.spent_s.values()) - self._charged_s
