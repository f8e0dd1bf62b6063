"""A test whether B is faster than A. It may be read after every pair without more false results.

A pair is two turns, one of A and one of B, one right after the other, in an order that a fair coin decides. It gives
one number, the log of A's time over B's. If B is not faster, the coin alone decides whether this number is above zero,
whatever the machine does. A gambler who starts with 1 and bets that more than half of the numbers are above zero then
has no expected gain: his wealth ever reaches ``1 / alpha`` with a probability of at most ``alpha``. Reaching it proves
that B is faster. docs/statistics.md has the formulas, the sources and simulations.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import Literal

import numpy as np

from lightning_accel.experiment.screening import DRIFT, screen

_ENOUGH = 14  # pairs that can prove a gain, with one bad pair among them

Outcome = Literal["faster", "not faster", ""]

TRIVIAL = 0.01
"""A negligible gain, as a log of a ratio: "not faster" means that the gain is smaller."""

ALPHA_NOT_FASTER = 0.05
"""The error rate of "not faster". Such an error loses a possible gain, but makes no run slower."""

MEMORY_RISE = 0.02
"""If peak memory grows by more than this share, the candidate must save time for it."""

LEAST_RISE_BYTES = 16 << 20
"""Bytes. Smaller differences in memory occur between two equal steps."""

# The shares above one half to bet on, and the stakes. Larger stakes near 1 prove large gains in few pairs, for a few
# more pairs with small gains.
_SHARES = 0.5 + (np.arange(64) + 0.5) / 128
_LOG_STAKES = np.log((1 / (1.02 - _SHARES)) / (1 / (1.02 - _SHARES)).sum())
_LOG_WON, _LOG_LOST = np.log(2 * _SHARES), np.log(2 * (1 - _SHARES))


def log_wealth(above: int, pairs: int) -> float:
    """Returns the log of the wealth from a stake of 1 after ``pairs`` pairs, of which ``above`` were above zero."""
    bets = _LOG_STAKES + above * _LOG_WON + (pairs - above) * _LOG_LOST
    return float(np.logaddexp.reduce(bets))


@dataclass(frozen=True)
class RatioInterval:
    """The speed of B as a multiple of A's.

    Attributes:
        ratio: The median of the pairs' ratios; 1.0 without any pair.
        low: The lower bound; 0.0 while there is none.
        high: The upper bound; infinite while there is none.
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
    """Returns the gain, as a log of a ratio, that B needs to justify its peak memory: a tenth if that is higher."""
    rise = candidate_bytes - original_bytes
    return math.log(1.1) if rise > max(MEMORY_RISE * original_bytes, LEAST_RISE_BYTES) else 0.0


class PairTest:
    """The test of one comparison. No other code may decide "faster".

    Args:
        alpha: The largest probability of ever returning "faster" for a candidate that is not.
        worth: The gain, as a log of a ratio, that B must exceed.
    """

    def __init__(self, alpha: float, worth: float = 0.0) -> None:
        self.alpha, self.worth = alpha, worth
        self.log_ratios: list[float] = []  # of A's time to B's, for each pair
        self._seconds: list[tuple[float, float]] = []  # of A and of B, for each pair
        self._above = self._below = 0

    def __len__(self) -> int:
        return len(self.log_ratios)

    def add(self, original: float, candidate: float) -> None:
        """Adds a pair: the times of a turn of A and of one of B."""
        ratio = math.log(original / candidate)
        self.log_ratios.append(ratio)
        self._seconds.append((original, candidate))
        self._above += ratio > self.worth
        self._below += ratio < self.worth + TRIVIAL

    def outcome(self) -> Outcome:
        """Returns what is proven so far; empty if nothing."""
        pairs = len(self)
        if log_wealth(self._above, pairs) >= math.log(1 / self.alpha) and self._is_less_in_sum():
            return "faster"
        if log_wealth(self._below, pairs) >= math.log(1 / ALPHA_NOT_FASTER):
            return "not faster"
        return ""

    def _is_less_in_sum(self) -> bool:
        """Returns whether B's times add up to less than A's: mostly faster but sometimes very slow is no gain.

        The longest turn of each side is left out, since the machine may have been busy just then. If it was busy for
        longer, as at the start of a run, A's times show it, too. Then the later half of many pairs counts alone.
        """
        earlier, later = self._seconds[: len(self) // 2], self._seconds[len(self) // 2 :]
        pairs = self._seconds
        if len(earlier) >= _ENOUGH:
            a_before_s, a_since_s = (statistics.fmean(original for original, _ in half) for half in (earlier, later))
            pairs = later if screen(a_before_s, a_since_s, by=DRIFT) == "faster" else pairs
        original_s, candidate_s = (sum(side) - max(side) for side in zip(*pairs, strict=True))
        return bool(candidate_s * math.exp(self.worth) < original_s)

    @property
    def original_s(self) -> float:
        """Returns the median seconds of a turn of A; 0.0 without any pair."""
        return statistics.median(original for original, _ in self._seconds) if self._seconds else 0.0

    @property
    def gain_s(self) -> float:
        """Returns the mean seconds that a turn of B saves against one of A."""
        return sum(original - candidate for original, candidate in self._seconds) / max(1, len(self))

    @property
    def is_mostly_faster(self) -> bool:
        return 2 * self._above > len(self)

    @property
    def is_promising(self) -> bool:
        """Whether B has won more than was staked. Of candidates that are not faster, one in 20 has after 14 pairs."""
        return log_wealth(self._above, len(self)) > 0

    def interval(self, alpha: float = 0.05) -> RatioInterval:
        """Returns all gains that are not rejected, each bound with half of ``alpha``, valid after every pair."""
        ordered = sorted(self.log_ratios)
        if not ordered:
            return RatioInterval(1.0, 0.0, math.inf)
        middle = math.exp((ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2)
        # A value is rejected by this many pairs above it, and likewise by as many below it.
        pairs, threshold = len(ordered), math.log(2 / alpha)
        rejecting = next((n for n in range(pairs // 2, pairs + 1) if log_wealth(n, pairs) >= threshold), None)
        if rejecting is None:
            return RatioInterval(middle, 0.0, math.inf)
        return RatioInterval(middle, math.exp(ordered[pairs - rejecting]), math.exp(ordered[rejecting - 1]))
