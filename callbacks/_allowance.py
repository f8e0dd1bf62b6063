"""What logging may cost: a part of the purse of the run, for what nobody has asked for. It is kept by resting, too."""

from __future__ import annotations

import math
import random
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
        self._is_own, self.is_asked = not isinstance(purse, Purse), is_asked
        self._purse = purse if isinstance(purse, Purse) else Purse()
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


IN_A_ROW = 8
"""Steps that are timed between two rests."""


class Rests:
    """Plans rests of a random length, so that rests do not always fall on the same part of an epoch.

    Attributes:
        left: The number of untimed steps to come. Whoever trains counts them down. If it is 0, the next step is timed.
        next_at: The number of steps after which the next rest may begin.
        to_come: The number of untimed steps to come after those in ``left``.
        samples: The number of samples in the steps that were timed since the last rest.
    """

    def __init__(self) -> None:
        self.next_at: float = math.inf
        self.left = self.to_come = self.samples = 0
        self._under_way = 0  # steps of the rest that were not asked about yet
        self._draw = random.Random(0)

    def plan(self, steps: int, timed: float | None) -> None:
        """Plans the next rest. It is no longer than the training so far, so that a short run has timed steps, too.

        Args:
            steps: The number of training steps so far.
            timed: The share of steps that may be timed; None if there is to be no rest now.
        """
        self.next_at = steps + IN_A_ROW
        if timed is not None:
            self.to_come = min(round(IN_A_ROW * (1 / timed - 1) * self._draw.uniform(0.5, 1.5)), steps)
            self.next_at += self.to_come

    def go_on(self, most: int) -> None:
        """Rests for as long as is planned, ``most`` steps at most."""
        self.left = self._under_way = min(self.to_come, most)
        self.to_come -= self.left

    def passed(self) -> tuple[int, int]:
        """The number of untimed steps since the last call, and about how many samples they had."""
        steps, self._under_way = self._under_way - self.left, self.left
        return steps, round(steps * self.samples / IN_A_ROW)
