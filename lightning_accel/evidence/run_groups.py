"""Several runs of one program beside as many of another: what one pair of runs cannot tell.

The runs are what is counted, each with one number: its mean step past the beginning, its peak of memory, its mean
loss at the last steps. (Pieces of one run tell how steady it was, and nothing of the hour in which it ran.) The
estimate is the median of all differences, of logarithms where it is a ratio, of a run of B to a run of A (Hodges and
Lehmann, "Estimates of Location Based on Rank Tests", 1963, https://doi.org/10.1214/aoms/1177704172). The interval
holds what the rank-sum test does not reject, by its exact distribution (Mann and Whitney, "On a Test of Whether one of
Two Random Variables is Stochastically Larger than the Other", 1947, https://doi.org/10.1214/aoms/1177730491): it needs
no bell curve, and no run counts for more than its place in the order.

As the distribution has steps, so has what can be promised. The interval is the narrowest of those that hold the truth
in 95% of all cases or more: with 5 runs of each in 96.8%, from the third smallest of the 25 differences to the third
largest; with 4 in 97.1%, from the smallest to the largest; with 3 at most in 90%, so that none is told.

The runs take turns, by a coin. What neighbours share, as the drift of a machine, is then in both: it makes the interval
wider than it had to be, and hardly moves it.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning_accel.evidence.compare import NotComparableError, RunComparison, compare_runs, interval_to_dict
from lightning_accel.evidence.record import Record
from lightning_accel.evidence.speed import know_samples, late, per_second
from lightning_accel.experiment.pair_test import RatioInterval

FEWEST_RUNS = 4
"""Of each: of fewer, no interval is told."""

CONFIDENCE = 0.95


@dataclass(frozen=True, kw_only=True)
class RunGroups(RunComparison):
    """Runs of B beside runs of A: medians over the runs (means, of what a step's time goes to, so that it adds up)."""

    runs: int  # how many there are of each
    confidence: float  # of the intervals, between 0.95 and 1; 0.0: too few runs for one
    each_per_second: tuple[list[float], list[float]]  # of the runs of A and of B, in their order
    memory: RatioInterval | None  # how many times as much B needs; None as `memory_mib`
    # By how much B's loss is above A's: estimate, low, high; None as `losses`.
    loss_shift: tuple[float, float, float] | None

    def is_larger(self, by: float) -> bool:
        """Whether B's peak of memory is larger by more than a share of A's, with the whole interval."""
        return self.memory is not None and self.memory.low > 1 + by

    @property
    def memory_change(self) -> str:
        return str(self.memory) if self.memory else ""

    @property
    def loss_change(self) -> str:
        if self.loss_shift is None:
            return ""
        middle, low, high = self.loss_shift
        return f"{middle:+.3g}" + (f" [{low:+.3g}, {high:+.3g}]" if self.confidence else "")

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        found = super().to_dict()
        found["speed"]["each_per_second"] = self.each_per_second
        if self.memory is not None:
            found["memory"] = interval_to_dict(self.memory)
        if self.loss_shift is not None:
            middle, low, high = self.loss_shift
            found["loss"] |= {"shift": middle, "interval": [low, high] if self.confidence else [None, None]}
        return {"runs": self.runs, "confidence": self.confidence, **found}


def bench(a: Sequence[Record], b: Sequence[Record]) -> RunGroups:
    """Runs of B beside as many of A, in the order in which they ran.

    Raises:
        NotComparableError: As of :func:`compare_runs`; or not all runs begin at the same step.
    """
    begins = sorted({record.steps[0].first for record in (*a, *b) if record.steps})
    if len(begins) > 1:
        raise NotComparableError(
            f"The runs begin at different steps, {' and '.join(map(str, begins))}: some went on where others had ended."
            " Let every run begin anew, or at a checkpoint that is the same for all."
        )
    pairs = [compare_runs(*pair) for pair in zip(a, b, strict=True)]
    by_sample = know_samples(steps for one in (*a, *b) for steps in one.steps)

    def rate_of(one: Record) -> float:
        return per_second(late(one.steps, one.held.step), one.header.world_size, by_sample=by_sample).per_second

    each_a, each_b = (list(map(rate_of, some)) for some in (a, b))
    peaks = [pair.memory_mib for pair in pairs if pair.memory_mib]
    memory = _medians(peaks) if len(peaks) == len(pairs) else None
    losses = [pair.losses for pair in pairs if pair.losses]
    has_losses = len(losses) == len(pairs) and len({pair.loss_step for pair in pairs}) == 1
    return RunGroups(
        runs=len(pairs),
        confidence=interval_rank(len(a), len(b))[1],
        speed=_ratio(each_a, each_b),
        unit="samples" if by_sample else "steps",
        per_second=(statistics.median(each_a), statistics.median(each_b)),
        each_per_second=(each_a, each_b),
        parts_ms=_mean_parts(pairs),
        memory_mib=memory,
        memory=_ratio(*zip(*peaks, strict=True)) if memory else None,
        losses=_medians(losses) if has_losses else None,
        loss_step=pairs[0].loss_step if has_losses else None,
        loss_shift=shift_of(*zip(*losses, strict=True)) if has_losses else None,
        differences=pairs[0].differences,
        remarks=tuple(_remarks(a, b, pairs)),
        unfinished=tuple(one for pair in pairs for one in pair.unfinished),
        is_alike=all(pair.is_alike for pair in pairs),
    )


def shift_of(a: Sequence[float], b: Sequence[float]) -> tuple[float, float, float]:
    """By how much B's numbers are above A's: estimate, low, high; without bounds where there are too few of them."""
    differences = sorted(y - x for x, y in itertools.product(a, b))
    rank, _ = interval_rank(len(a), len(b))
    middle = statistics.median(differences)
    return (middle, differences[rank - 1], differences[-rank]) if rank else (middle, -math.inf, math.inf)


def interval_rank(count_a: int, count_b: int) -> tuple[int, float]:
    """Which of the ordered differences bound the interval, from either end, and how often it holds the truth.

    Returns:
        The largest rank of which that is in 95% of all cases or more, and the share of these; 0 and 0.0: there is none.
    """
    orders = orders_by_wins(count_a, count_b)
    total, beyond, rank, confidence = sum(orders), 0, 0, 0.0
    for number in orders:
        beyond += number
        if 1 - 2 * beyond / total < CONFIDENCE:
            break
        rank, confidence = rank + 1, 1 - 2 * beyond / total
    return rank, confidence


def orders_by_wins(count_a: int, count_b: int) -> list[int]:
    """In how many of all orders of A's and B's numbers a number of A is above one of B 0, 1, 2, … times.

    They are the coefficients of the Gaussian binomial: the product of (1 - q^(a + i)) / (1 - q^i), for i up to b.
    """
    orders = [1] + [0] * (count_a * count_b)
    for index in range(1, count_b + 1):
        for wins in range(len(orders) - 1, count_a + index - 1, -1):
            orders[wins] -= orders[wins - count_a - index]
        for wins in range(index, len(orders)):
            orders[wins] += orders[wins - index]
    return orders


def _ratio(a: Sequence[float], b: Sequence[float]) -> RatioInterval:
    """B's numbers by A's."""
    middle, low, high = shift_of([math.log(one) for one in a], [math.log(one) for one in b])
    return RatioInterval(math.exp(middle), math.exp(low), math.exp(high))


def _medians(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return statistics.median(a for a, _ in pairs), statistics.median(b for _, b in pairs)


def _mean_parts(pairs: Sequence[RunComparison]) -> dict[str, tuple[float, float]]:
    """Of all pairs; nothing where one has none."""
    if not all(pair.parts_ms for pair in pairs):
        return {}
    parts = dict.fromkeys(part for pair in pairs for part in pair.parts_ms)
    each = {part: [pair.parts_ms.get(part, (0.0, 0.0)) for pair in pairs] for part in parts}
    return {part: (statistics.fmean(a for a, _ in ms), statistics.fmean(b for _, b in ms)) for part, ms in each.items()}


def _remarks(a: Sequence[Record], b: Sequence[Record], pairs: Sequence[RunComparison]) -> list[str]:
    found = []
    if not interval_rank(len(a), len(b))[0]:
        found.append(f"too few runs for an interval of 95%, which takes {FEWEST_RUNS} of each")
    if "machine" in pairs[0].differences:
        found.append("the machines differ: the ratio is theirs as much as the code's")
    if any(pair.memory_mib is None for pair in pairs):
        found.append("peaks of memory are not compared: a run has none, or they were not measured alike")
    for side, records in (("A", a), ("B", b)):
        for number, record in enumerate(records, start=1):
            if record.status != "finished":
                found.append(f"run {number} of {side} {record.status or 'has no end in its record'}")
    return found
