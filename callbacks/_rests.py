"""Rests: untimed steps of a fit, if it would cost too much to time each step."""

from __future__ import annotations

import math
import random

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
