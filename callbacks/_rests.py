"""Rests: steps of a fit that nobody looks at, where to time each of them would cost too much."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

IN_A_ROW = 8
"""Steps that are timed between two rests."""


@dataclass
class Rest:
    """Steps that nobody looks at.

    Attributes:
        left: How many are yet to come; if 0, the next step is looked at.
    """

    left: int = 0


class Rests:
    """Plans rests of a length that chance decides, so that it is not always the same part of an epoch.

    Args:
        rest: Tells whoever is called in each step how many calls to leave out.
        are_taken: Whether there are to be any.

    Attributes:
        next_at: After how many steps the next rest may begin.
        to_come: How many steps of the present rest are not in ``rest`` yet.
        samples: Of the steps in the present row.
    """

    def __init__(self, rest: Rest, *, are_taken: bool) -> None:
        self._rest = rest
        self._under_way = 0  # steps of the rest that were not asked about yet
        self._draw = random.Random(0)
        self.next_at: float = IN_A_ROW if are_taken else math.inf
        self.to_come = self.samples = 0

    def plan(self, steps: int, timed: float | None) -> None:
        """Plans the rest that begins after ``steps`` steps.

        Args:
            steps: How many there were. A rest is not longer: a short run is not to rest until it ends.
            timed: The share of steps that may be timed; None if there is to be no rest now.
        """
        self.next_at = steps + IN_A_ROW
        if timed is not None:
            self.to_come = min(round(IN_A_ROW * (1 / timed - 1) * self._draw.uniform(0.5, 1.5)), steps)
            self.next_at += self.to_come

    def go_on(self, most: int) -> None:
        """Rests for as long as is planned, ``most`` steps at most."""
        self._rest.left = self._under_way = min(self.to_come, most)
        self.to_come -= self._under_way

    def passed(self) -> tuple[int, int]:
        """How many steps of the rest have passed since this was last asked, and about how many samples they had."""
        steps, self._under_way = self._under_way - self._rest.left, self._rest.left
        return steps, round(steps * self.samples / IN_A_ROW)
