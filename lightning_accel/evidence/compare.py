"""Two runs beside each other: speed with an interval, memory, loss at equal steps, and what else was not the same.

Speed is judged on consecutive pieces of each run, past its beginning, in which caches fill and live trials are made.
The ratio is the median of all ratios of a piece of one run to a piece of the other (Hodges and Lehmann, "Estimates of
Location Based on Rank Tests", 1963, https://doi.org/10.1214/aoms/1177704172), and the interval holds every ratio that
the rank-sum test does not reject. It speaks of these two runs: what another hour of the machine would have done to
either, only more runs can tell.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lightning_accel.evidence.record import Record
from lightning_accel.tuning.pairs import Interval

BEGINNING = 0.2
"""Of a run's steps, which are not compared."""

FEWEST_PIECES = 6
"""Of each run: of fewer, no interval is told."""

_Z = statistics.NormalDist().inv_cdf(0.975)
_LAST_LOSSES = 8


class NotComparableError(ValueError):
    """Two runs that have nothing in common to be compared. It says what differs."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """B beside A.

    Attributes:
        speed: How many times as fast B trains, per sample where both know their samples, else per step.
        unit: ``"samples"`` or ``"steps"``.
        per_second: Of A and of B, in that unit, at the median piece.
        parts_ms: What a step's time goes to, in milliseconds of A's and of B's mean step; empty where one is not known.
        memory_mib: The peaks of A and of B; None where one is not known, or they were not measured alike.
        losses: Of A and of B, the mean over the last steps that both have; None: there are none.
        loss_step: The last of those steps.
        differences: What else is not the same: name → that of A, that of B.
        remarks: What to mind when this is read.
    """

    speed: Interval
    unit: str
    per_second: tuple[float, float]
    parts_ms: Mapping[str, tuple[float, float]]
    memory_mib: tuple[float, float] | None
    losses: tuple[float, float] | None
    loss_step: int | None
    differences: Mapping[str, tuple[str, str]]
    remarks: tuple[str, ...]

    def is_slower(self, by: float) -> bool:
        """Whether B is slower than A by more than a share of A's speed, with the whole interval."""
        return self.speed.high < 1 - by

    def is_larger(self, by: float) -> bool:
        """Whether B's peak of memory is larger than A's by more than a share of it."""
        return self.memory_mib is not None and self.memory_mib[1] > (1 + by) * self.memory_mib[0]

    @property
    def memory_change(self) -> str:
        """B's peak of memory by A's, for people; empty where it is not known."""
        return f"{self.memory_mib[1] / self.memory_mib[0]:.2f}x" if self.memory_mib else ""

    @property
    def loss_change(self) -> str:
        """B's loss by A's, for people; empty where it is not known."""
        return (
            f"{(self.losses[1] - self.losses[0]) / abs(self.losses[0]):+.2%}" if self.losses and self.losses[0] else ""
        )

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return {
            "speed": {**interval_to_dict(self.speed), "unit": self.unit, "per_second": self.per_second},
            "parts_ms": {part: list(pair) for part, pair in self.parts_ms.items()},
            "memory_mib": self.memory_mib,
            "loss": None if self.losses is None else {"step": self.loss_step, "values": self.losses},
            "differences": {name: list(pair) for name, pair in self.differences.items()},
            "remarks": list(self.remarks),
        }


def interval_to_dict(interval: Interval) -> dict[str, Any]:
    """As plain values; JSON has no infinity."""
    high = None if math.isinf(interval.high) else interval.high
    return {"ratio": interval.ratio, "interval": [interval.low, high]}


def compare(a: Record, b: Record) -> Comparison:
    """B beside A.

    Raises:
        NotComparableError: They are runs of different models, or on different kinds of device, or one has no steps.
    """
    _check(a, b)
    by_sample = know_samples((a, b))
    a_ms, b_ms = (ms_each(record, by_sample=by_sample) for record in (a, b))
    first, second = a.parts_ms, b.parts_ms
    parts = dict.fromkeys([*first, *second]) if first and second else ()
    memory = a.peak_memory_mib, b.peak_memory_mib
    is_alike = _source(a) == _source(b)
    common = sorted(a.losses.keys() & b.losses.keys())[-_LAST_LOSSES:]
    losses = [statistics.fmean(record.losses[step] for step in common) for record in (a, b)] if common else []
    return Comparison(
        speed=ratio_of(a_ms, b_ms),
        unit="samples" if by_sample else "steps",
        per_second=(1e3 / statistics.median(a_ms), 1e3 / statistics.median(b_ms)),
        parts_ms={part: (first.get(part, 0.0), second.get(part, 0.0)) for part in parts},
        memory_mib=(memory[0], memory[1]) if is_alike and memory[0] and memory[1] else None,
        losses=(losses[0], losses[1]) if common else None,
        loss_step=common[-1] if common else None,
        differences=dict(_differences(a, b)),
        remarks=tuple(_remarks(a, b, is_alike, min(len(a_ms), len(b_ms)))),
    )


def ratio_of(a_ms: list[float], b_ms: list[float], z: float = _Z) -> Interval:
    """How many times as fast B is as A, of the times of pieces of each.

    Args:
        a_ms: What A took.
        b_ms: What B took.
        z: The quantile of the normal distribution to which the rank-sum test rejects.
    """
    ratios = sorted(math.log(a / b) for a in a_ms for b in b_ms)
    count_a, count_b = len(a_ms), len(b_ms)
    middle = math.exp(statistics.median(ratios))
    spread = z * math.sqrt(count_a * count_b * (count_a + count_b + 1) / 12)
    rank = math.floor(len(ratios) / 2 - spread)
    if min(count_a, count_b) < FEWEST_PIECES or rank < 1:
        return Interval(middle, 0.0, math.inf)
    return Interval(middle, math.exp(ratios[rank - 1]), math.exp(ratios[-rank]))


def _check(a: Record, b: Record) -> None:
    for what, name in (("model", "model"), ("number of parameters", "parameters"), ("number of ranks", "world_size")):
        first, second = getattr(a.header, name), getattr(b.header, name)
        if first != second and None not in (first, second):
            raise NotComparableError(
                f"The {what} is not the same: {first} in {a.path}, {second} in {b.path}. Only runs of one training can"
                " be compared."
            )
    for record in (a, b):
        if not any(some.cycle_ms for some in record.steps):
            how = record.status or "it was killed, or is still in its first minute"
            raise NotComparableError(f"{record.path} has no steps: {how}. Train for more steps.")


def know_samples(records: Iterable[Record]) -> bool:
    """Whether all of them know how many samples their steps had, so that they can be compared by the sample."""
    return all(some.samples for record in records for some in record.steps if some.timed)


def ms_each(record: Record, *, by_sample: bool) -> list[float]:
    """Milliseconds of a step, or of a sample, in each piece past the beginning; of a very short run in its last one."""
    begin = record.steps[0].first + BEGINNING * record.num_steps
    found = []
    for some in record.steps:
        steps_a_piece = (some.last - some.first + 1) / max(1, len(some.cycle_ms))
        samples = (some.samples or 0) / max(1, some.timed) if by_sample else 1.0
        for index, ms in enumerate(some.cycle_ms):
            found.append((some.first + index * steps_a_piece, ms / samples))
    return [ms for step, ms in found if step >= begin] or [found[-1][1]]


def _source(record: Record) -> str:
    return str(record.epochs[-1]["peak_memory_source"]) if record.epochs else ""


def _differences(a: Record, b: Record) -> Iterator[tuple[str, tuple[str, str]]]:
    first, second = a.header, b.header
    for name in ("machine", "cores", "precision", "strategy"):
        yield from _where_other(name, getattr(first, name), getattr(second, name))
    for name in sorted(first.versions.keys() | second.versions.keys()):
        yield from _where_other(name, first.versions.get(name, "none"), second.versions.get(name, "none"))
    mine, theirs = first.settings, second.settings
    if mine is None or theirs is None:
        yield from _where_other("AccelPlugin", *("no" if one is None else "yes" for one in (mine, theirs)))
        return
    for name in dict.fromkeys([*mine, *theirs]):
        yield from _where_other(name, mine.get(name), theirs.get(name))


def _where_other(name: str, first: Any, second: Any) -> Iterator[tuple[str, tuple[str, str]]]:
    if first != second:
        yield name, (str(first), str(second))


def _remarks(a: Record, b: Record, is_alike: bool, pieces: int) -> Iterator[str]:
    if a.header.machine != b.header.machine:
        yield "the machines differ: the ratio is theirs as much as the runs'"
    if pieces < FEWEST_PIECES:
        yield f"too few steps for an interval: one of the runs has {pieces} pieces past its beginning"
    if not is_alike and a.epochs and b.epochs:
        yield "the peaks of memory were not measured alike, and are not compared"
    for record in (a, b):
        if record.status != "finished":
            yield f"{record.path.parent} {record.status or 'has no end: it was killed, or still runs'}"
