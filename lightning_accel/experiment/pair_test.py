"""Is B faster than A? Judged pair by pair, at any time, with an error that holds however often one looks.

A pair is two turns, one of A and one of B, one right after the other, in an order that a fair coin decides. It gives
one number, the log of A's time over B's. Were B not faster, the coin alone would decide whether that number is above
zero, whatever the machine does. A gambler who starts with 1 and bets that more than half of the numbers are above has
no gain to expect then: his wealth ever reaches ``1 / alpha`` with a probability of at most ``alpha``. Reaching it is
the proof that B is faster. docs/statistics.md has the formulas, the sources and simulations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

Outcome = Literal["faster", "not faster", ""]

TRIVIAL = 0.01
"""A gain, as a log of a ratio, that nobody would miss: "not faster" means by less than this."""

ALPHA_NOT_FASTER = 0.05
"""The error allowed in saying "not faster": it costs what could have been gained, and breaks no promise."""

MEMORY_RISE = 0.02
"""If peak memory grows by this share or more, the candidate has to win time for it."""

LEAST_RISE_BYTES = 16 << 20
"""Bytes. A smaller difference in memory may occur between two equal steps."""

# The shares that are bet on, above one half, and the stakes: more on those near 1, by which large gains show in few
# pairs, at a price of few more pairs for small ones.
_SHARES = 0.5 + (np.arange(64) + 0.5) / 128
_LOG_STAKES = np.log((1 / (1.02 - _SHARES)) / (1 / (1.02 - _SHARES)).sum())
_LOG_WON, _LOG_LOST = np.log(2 * _SHARES), np.log(2 * (1 - _SHARES))


def log_wealth(above: int, pairs: int) -> float:
    """The log of what a stake of 1 has become after ``pairs`` pairs, of which ``above`` were above."""
    bets = _LOG_STAKES + above * _LOG_WON + (pairs - above) * _LOG_LOST
    return float(np.logaddexp.reduce(bets))


@dataclass(frozen=True)
class RatioInterval:
    """How many times as fast B is as A.

    Attributes:
        ratio: The median of the pairs' ratios; 1.0 without any.
        low: The least value that is not rejected; 0.0 while none is.
        high: The largest; infinite while none is rejected.
    """

    ratio: float
    low: float
    high: float

    def __str__(self) -> str:
        bounds = [f"at least {self.low:.2f}x"] * (self.low > 0) + [f"at most {self.high:.2f}x"] * math.isfinite(
            self.high
        )
        shown = f"[{self.low:.2f}, {self.high:.2f}]" if len(bounds) == 2 else f"({(bounds or ['not decided'])[0]})"
        return f"{self.ratio:.2f}x {shown}"


def price_of_memory(original_bytes: int, candidate_bytes: int) -> float:
    """What B has to be faster by for its peak of memory, as a log of a ratio: by a tenth if that is higher."""
    rise = candidate_bytes - original_bytes
    return math.log(1.1) if rise > max(MEMORY_RISE * original_bytes, LEAST_RISE_BYTES) else 0.0


class PairTest:
    """The test of one comparison: the only one that may say "faster".

    Args:
        alpha: The probability, at most, of ever saying "faster" of what is not.
        worth: The gain, as a log of a ratio, by more than which B has to be faster.
    """

    def __init__(self, alpha: float, worth: float = 0.0) -> None:
        self.alpha, self.worth = alpha, worth
        self.log_ratios: list[float] = []  # of A's time to B's, for each pair
        self._seconds = [0.0, 0.0]
        self._above = self._below = 0

    def __len__(self) -> int:
        return len(self.log_ratios)

    def add(self, original: float, candidate: float) -> None:
        """Takes up a pair: what a turn of A took, and one of B."""
        ratio = math.log(original / candidate)
        self.log_ratios.append(ratio)
        self._seconds[0] += original
        self._seconds[1] += candidate
        self._above += ratio > self.worth
        self._below += ratio < self.worth + TRIVIAL

    def outcome(self) -> Outcome:
        """What is proven so far; empty: nothing."""
        pairs = len(self)
        # A turn that is mostly faster, and takes an age every now and then, is no gain: the sum must be one, too.
        is_less_in_sum = self._seconds[1] * math.exp(self.worth) < self._seconds[0]
        if is_less_in_sum and log_wealth(self._above, pairs) >= math.log(1 / self.alpha):
            return "faster"
        if log_wealth(self._below, pairs) >= math.log(1 / ALPHA_NOT_FASTER):
            return "not faster"
        return ""

    @property
    def gain_s(self) -> float:
        """What a turn of B takes less than one of A, in seconds, on average."""
        return (self._seconds[0] - self._seconds[1]) / max(1, len(self))

    @property
    def is_mostly_faster(self) -> bool:
        return 2 * self._above > len(self)

    @property
    def is_promising(self) -> bool:
        """Whether B has won more than was staked: of what is no faster, one in 20 has after 14 pairs."""
        return log_wealth(self._above, len(self)) > 0

    def interval(self, alpha: float = 0.05) -> RatioInterval:
        """Every gain that is not rejected, from either side with half of ``alpha``; at all times at once."""
        ordered = sorted(self.log_ratios)
        if not ordered:
            return RatioInterval(1.0, 0.0, math.inf)
        middle = math.exp((ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2)
        # So many above a value reject it; those below are as many, from the other end.
        pairs, threshold = len(ordered), math.log(2 / alpha)
        rejecting = next((n for n in range(pairs // 2, pairs + 1) if log_wealth(n, pairs) >= threshold), None)
        if rejecting is None:
            return RatioInterval(middle, 0.0, math.inf)
        return RatioInterval(middle, math.exp(ordered[pairs - rejecting]), math.exp(ordered[rejecting - 1]))
