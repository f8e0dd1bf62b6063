"""Rests: steps of a fit that nobody looks at, where to time each of them would cost too much."""

from __future__ import annotations

import math
import random

IN_A_ROW = 8
"""Steps that are timed between two rests."""


class Rests:
    """Plans rests of a length that chance decides, so that it is not always the same part of an epoch.

    Attributes:
        left: How many steps of the present rest are yet to come. Whoever trains counts them down, and tells nobody of
            them. If it is 0, the next step is looked at.
        next_at: After how many steps the next rest may begin.
        to_come: How many steps the present rest goes on for after those that are left.
        samples: Of the steps that were timed since the last rest.
    """

    def __init__(self) -> None:
        self.next_at: float = math.inf
        self.left = self.to_come = self.samples = 0
        self._under_way = 0  # steps of the rest that were not asked about yet
        self._draw = random.Random(0)

    def plan(self, steps: int, timed: float | None) -> None:
        """Plans the rest that begins after ``steps`` steps: not more of them, as a short run is not to rest to its end.

        Args:
            steps: How many there were.
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
        """How many steps of the rest have passed since this was last asked, and about how many samples they had."""
        steps, self._under_way = self._under_way - self.left, self.left
        return steps, round(steps * self.samples / IN_A_ROW)
