"""Screening: a decision from a few times about what to try. It proves nothing.

Other work on a machine can only add to a time, so the least time of each side counts. With the two pairs for which a
part is timed, no test could tell more. docs/statistics.md has the error rate. The proof is
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
"""Times that differ by a smaller factor are a tie: times on shared machines are not more precise."""

DRIFT = 1.2
"""If steps become slower by this factor, earlier results are tested again."""

LATEST = 16  # steps from which such a drift is detected

PAIRS = 2  # for which a part is timed


def screen(original: float, candidate: float, *, by: float = CLEARLY) -> Literal["faster", "slower", ""]:
    """Classifies the candidate by the least time of each side; empty if neither is clearly faster."""
    if candidate * by < original:
        return "faster"
    return "slower" if original * by < candidate else ""


def fastest(seconds: Mapping[Name, Sequence[float]]) -> Name:
    """Returns the first name, in order of preference, than which no other is clearly faster by the least times."""
    least = {name: min(times) for name, times in seconds.items()}
    return next(name for name, took in least.items() if screen(took, min(least.values())) != "faster")


class LatestTimes(deque[float]):
    """The times of the latest steps in seconds, and whether these are slower than the first steps were."""

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
