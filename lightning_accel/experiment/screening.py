"""Screening: a look at a few times, before the proof. It decides what is tried on, and proves nothing.

Whatever else a machine does can only add to a time, so of each side the least counts. With the two pairs that a part is
timed for, no test could tell more. docs/statistics.md has the error, and the proof is
:class:`~lightning_accel.experiment.pair_test.PairTest`, on whole training steps.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Literal, TypeVar

from typing_extensions import override

Name = TypeVar("Name")

CLEARLY = 1.03
"""Times that differ by a smaller factor are a tie: the clocks of shared machines tell no more."""

DRIFT = 1.2
"""Where a step has come to take so many times as long, what was proven of it is asked anew."""

LATEST = 16  # steps, by which that is seen

PAIRS = 2  # that a part is timed for


def screen(original: float, candidate: float, *, by: float = CLEARLY) -> Literal["faster", "slower", ""]:
    """What the candidate is, by the least time of each side; empty if neither is clear."""
    if candidate * by < original:
        return "faster"
    return "slower" if original * by < candidate else ""


def fastest(seconds: Mapping[Name, Sequence[float]]) -> Name:
    """The first, in the order of preference, than which none is clearly faster by their least times."""
    least = {name: min(times) for name, times in seconds.items()}
    return next(name for name, took in least.items() if screen(took, min(least.values())) != "faster")


class LatestTimes(deque[float]):
    """What the latest steps took, in seconds, and whether they take longer than the first of them did."""

    def __init__(self) -> None:
        super().__init__(maxlen=LATEST)
        self._first_s = math.inf

    @property
    def typical_s(self) -> float:
        return statistics.median(self)

    @property
    def have_drifted(self) -> bool:
        return bool(self) and screen(self.typical_s, self._first_s, by=DRIFT) == "faster"

    @override
    def append(self, seconds: float, /) -> None:
        super().append(seconds)
        if math.isinf(self._first_s) and len(self) == LATEST:
            self._first_s = self.typical_s
