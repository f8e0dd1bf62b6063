"""Screening: a look at a few times, before the proof. It decides what is tried on, and proves nothing.

Whatever else a machine does can only add to a time, so of each side the least counts. With the one to three pairs that
a part is timed for, no test could tell more. docs/statistics.md has the error, and the proof is
:class:`~lightning_accel.experiment.pair_test.PairTest`, on whole training steps.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Literal, TypeVar

Name = TypeVar("Name")

CLEARLY = 1.03
"""Times that differ by a smaller factor are a tie: the clocks of shared machines tell no more."""

MOST_PAIRS = 3
"""That a part is timed for: whole training steps are what judges in the end."""

_AT_A_GLANCE = 1.18  # times that differ by this factor need no further pair


def screen(original: float, candidate: float, *, by: float = CLEARLY) -> Literal["faster", "slower", ""]:
    """What the candidate is, by the least time of each side; empty if neither is clear."""
    if candidate * by < original:
        return "faster"
    return "slower" if original * by < candidate else ""


def fastest(least: Mapping[Name, float]) -> Name:
    """The first, in the order of preference, than which none is clearly faster by their least times."""
    best = min(least.values())
    return next(name for name, took in least.items() if screen(took, best) != "faster")


def least_of_pairs(
    rounds: Iterator[Mapping[int, float]], *, fewest: int = 1, most: int = MOST_PAIRS
) -> tuple[float, float]:
    """The least times of the sides 0 and 1, by as many pairs as it takes to see which is clearly less.

    That the candidate is slower takes two looks: what is refused is refused for good, and what is kept is tried on.
    """
    original = candidate = math.inf
    for pairs, took in enumerate(itertools.islice(rounds, min(most, MOST_PAIRS)), start=1):
        original, candidate = min(original, took[0]), min(candidate, took[1])
        outcome = screen(original, candidate, by=_AT_A_GLANCE)
        if pairs >= fewest and (outcome == "faster" or (outcome == "slower" and pairs > 1)):
            break
    return original, candidate
