"""What logging may cost: a part of the purse of the run, for what nobody has asked for."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager

from lightning_accel.callbacks._epoch_ends import turns_left
from lightning_accel.core.purse import SHARE as OF_THE_RUN
from lightning_accel.core.purse import Purse
from lightning_accel.lightning.packages import Trainer

LOGGING = "logging"
SHARE = 0.002
"""Of what the run is expected to take."""


class Allowance:
    """The logger's share of AccelPlugin's purse, or of one of its own in a run without it.

    Args:
        trainer: In its fit.
        is_asked: Whether the user has asked for what is to be paid for: it is done then, whatever it costs.
    """

    def __init__(self, trainer: Trainer, *, is_asked: bool) -> None:
        purse = getattr(trainer.precision_plugin, "purse", None)
        self._is_own = not isinstance(purse, Purse)
        self._purse = purse if isinstance(purse, Purse) else Purse()
        self.is_asked = is_asked
        if self._is_own:
            self._purse.steps = max(0.0, turns_left(trainer) * trainer.accumulate_grad_batches)

    @property
    def step_s(self) -> float:
        """What a step takes; 0 while none is over."""
        return self._purse.step_s or 0.0

    def took(self, steps: int, latest_ms: Iterable[float]) -> None:
        """Told how many steps are over, and what the latest of them took."""
        self._purse.done = max(self._purse.done, steps)
        if self._is_own:  # else the plugin tells what they take
            for ms in latest_ms:
                self._purse.step_took(ms / 1e3)

    def can_pay(self, seconds: float) -> bool:
        """Whether something may be done that takes as long."""
        purse = self._purse
        most = SHARE / OF_THE_RUN * purse.total_s
        return self.is_asked or (purse.spent_s[LOGGING] + seconds <= most and purse.can_pay(seconds))

    def part_of_steps(self, seconds: float) -> float:
        """Of how many steps one may take longer by as much, for half of the share: 1.0, all of them."""
        return 1.0 if self.is_asked or not self.step_s else min(1.0, SHARE / 2 * self.step_s / seconds)

    def paying(self) -> AbstractContextManager[None]:
        """Pays for what is done inside."""
        return self._purse.paying(LOGGING)

    def pay(self, seconds: float) -> None:
        """Pays for what was done."""
        self._purse.pay(LOGGING, max(0.0, seconds))
