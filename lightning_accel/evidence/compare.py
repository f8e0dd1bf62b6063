"""Two runs beside each other: speed with an interval, memory, loss at equal steps, and what else was not the same.

Speed is the mean time of a run's steps since live trials had settled, or past its beginning, in which caches fill: the
mean and no median, as a step in a hundred that takes a second is waited for, too. Steps that follow each other are
alike, so the interval is that of the means of ten long blocks of each run (Schmeiser, "Batch Size Effects in the
Analysis of Simulation Output", 1982, https://doi.org/10.1287/opre.30.3.556), as Student's t has it of the logs of their
ratio. It speaks of these two runs: what another hour of the machine would have done to either, only more runs can tell.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_accel.evidence.events import Piece
from lightning_accel.evidence.record import Record
from lightning_accel.evidence.speed import BEGINNING, FEWEST, know_samples, late, mean_ms, per_second
from lightning_accel.experiment.pair_test import RatioInterval

BLOCKS = 10
"""Of each run; of fewer pieces than that, no interval is told."""

_T = 2.262  # Student's t of 95%, two-sided, with one degree of freedom less than there are blocks
_LAST_LOSSES = 8


class NotComparableError(ValueError):
    """Two runs that have nothing in common to be compared. It says what differs."""


@dataclass(frozen=True, kw_only=True)
class RunComparison:
    """B beside A."""

    speed: RatioInterval  # how many times as fast B trains, per sample where both know their samples, else per step
    unit: str  # `"samples"` or `"steps"`
    # Of A and of B, in that unit: samples of all ranks, steps of one, as the ranks step together.
    per_second: tuple[float, float]
    # What a step's time goes to, in milliseconds of A's and of B's mean step; empty where one is not known.
    parts_ms: Mapping[str, tuple[float, float]]
    # The peaks of A and of B; None where one is not known, or they were not measured alike.
    memory_mib: tuple[float, float] | None
    # Of A and of B, the mean over the last steps that both have; None: there are none, or no finite ones.
    losses: tuple[float, float] | None
    loss_step: int | None  # the last of those steps
    differences: Mapping[str, tuple[str, str]]  # what else is not the same: name → that of A, that of B
    remarks: tuple[str, ...]  # what to mind when this is read
    unfinished: tuple[str, ...]  # the runs that have not finished, and how they ended
    is_alike: bool  # whether both were measured in the same way: by samples or by steps, their memory by the same books

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


def interval_to_dict(interval: RatioInterval) -> dict[str, Any]:
    """As plain values; JSON has no infinity."""
    high = None if math.isinf(interval.high) else interval.high
    return {"ratio": interval.ratio, "interval": [interval.low, high]}


def compare_runs(a: Record, b: Record) -> RunComparison:
    """B beside A.

    Raises:
        NotComparableError: They are runs of different models, or on different kinds of device, or one has no steps.
    """
    _check(a, b)
    knows_samples = [know_samples(record.steps) for record in (a, b)]
    by_sample = all(knows_samples)
    pieces = [late(record.steps, record.held.step) for record in (a, b)]
    a_speed, b_speed = (per_second(some, a.header.world_size, by_sample=by_sample) for some in pieces)
    a_blocks, b_blocks = (_blocks_ms(some, by_sample=by_sample) for some in pieces)
    first, second = a.parts_ms(BEGINNING), b.parts_ms(BEGINNING)
    parts = dict.fromkeys([*first, *second]) if first and second else ()
    memory = a.peak_memory_mib, b.peak_memory_mib
    has_same_books = a.peak_memory_source == b.peak_memory_source
    common = sorted(a.losses.keys() & b.losses.keys())[-_LAST_LOSSES:]
    losses = [statistics.fmean(record.losses[step] for step in common) for record in (a, b)] if common else []
    is_finite = all(map(math.isfinite, losses))
    remarks = list(_remarks(a, b))
    if len(set(knows_samples)) > 1:
        remarks.append("one of the runs does not know its samples: it is steps that are compared, whatever is in them")
    if min(len(a_blocks), len(b_blocks)) < BLOCKS:
        remarks.append(f"too few steps for an interval: it takes {BLOCKS} pieces of a run past its beginning")
    if not is_finite:
        remarks.append(f"the loss is no number any more: {losses[0]:g} of A, {losses[1]:g} of B at step {common[-1]:,}")
    has_memory = has_same_books and memory[0] is not None and memory[1] is not None
    if not has_memory:
        why = "they were not measured alike" if all(memory) else "not every run has a completed epoch"
        remarks.append(f"the peaks of memory are not compared: {why}")
    return RunComparison(
        speed=_interval(b_speed.per_second / a_speed.per_second, a_blocks, b_blocks),
        unit=a_speed.unit,
        per_second=(a_speed.per_second, b_speed.per_second),
        parts_ms={part: (first.get(part, 0.0), second.get(part, 0.0)) for part in parts},
        memory_mib=(memory[0] or 0.0, memory[1] or 0.0) if has_memory else None,
        losses=(losses[0], losses[1]) if common and is_finite else None,
        loss_step=common[-1] if common else None,
        differences=_differences(a, b),
        remarks=tuple(remarks),
        unfinished=tuple(f"{record.path} {how_ended(record)}" for record in (a, b) if record.status != "finished"),
        is_alike=has_same_books and len(set(knows_samples)) == 1,
    )


def _interval(ratio: float, a_ms: list[float], b_ms: list[float]) -> RatioInterval:
    """Of a ratio of means, by the means of blocks of either."""
    if min(len(a_ms), len(b_ms)) < BLOCKS:
        return RatioInterval(ratio, 0.0, math.inf)
    error = math.sqrt(sum((statistics.stdev(ms) / statistics.fmean(ms)) ** 2 / len(ms) for ms in (a_ms, b_ms)))
    return RatioInterval(ratio, ratio * math.exp(-_T * error), ratio * math.exp(_T * error))


def _check(a: Record, b: Record) -> None:
    # A script's classes are in __main__, or in a package, by how it is started; ranks with shards count their own.
    parameters = [one.header.parameters if one.header.strategy == a.header.strategy else None for one in (a, b)]
    models = [record.header.model for record in (a, b)]
    is_same_model = models[0].rpartition(".")[2] == models[1].rpartition(".")[2]
    for what, first, second in (
        ("model", models[0], models[0] if is_same_model else models[1]),
        ("number of parameters", *parameters),
        ("number of ranks", a.header.world_size, b.header.world_size),
    ):
        if first != second and None not in (first, second):
            raise NotComparableError(
                f"The {what} is not the same: {first} in {a.path}, {second} in {b.path}. Only runs of one training can"
                " be compared."
            )
    for record in (a, b):
        if (timed := sum(some.timed for some in record.steps)) < FEWEST:
            how = record.status or "it was killed, or is still in its first minute"
            has = f"has {timed} timed steps" if timed else "has no steps"
            raise NotComparableError(f"{record.path} {has}: {how}. Train for more steps.")


def how_ended(record: Record) -> str:
    """In words, of a run that did not finish."""
    return record.status or "has no end: it was killed, or still runs"


def _blocks_ms(pieces: Sequence[Piece], *, by_sample: bool) -> list[float]:
    """Mean milliseconds of a step, or of a sample, in blocks of about as many steps each."""
    total = sum(piece.steps for piece in pieces)
    blocks: list[list[Piece]] = [[] for _ in range(min(BLOCKS, len(pieces)))]
    passed = 0
    for piece in pieces:
        blocks[min(len(blocks) - 1, passed * len(blocks) // total)].append(piece)
        passed += piece.steps
    return [mean_ms(block, by_sample=by_sample) for block in blocks if block]


def _differences(*records: Record) -> dict[str, tuple[str, str]]:
    headers = [record.header for record in records]
    settings = [header.settings for header in headers]
    names = ("machine", "cores", "precision", "strategy", "accumulate_grad_batches", "loaders")
    rows = [(name, *(getattr(header, name) for header in headers)) for name in names]
    packages = sorted({name for header in headers for name in header.versions})
    rows += [(name, *(header.versions.get(name, "none") for header in headers)) for name in packages]
    if None in settings:
        rows.append(("AccelPlugin", *("no" if one is None else "yes" for one in settings)))
    else:
        options = dict.fromkeys(name for one in settings for name in one or ())
        rows += [(name, *((one or {}).get(name) for one in settings)) for name in options]
    return {name: (str(first), str(second)) for name, first, second in rows if first != second}


def _remarks(a: Record, b: Record) -> Iterator[str]:
    if a.path == b.path:
        yield "this is one run beside itself"
    if a.header.machine != b.header.machine:
        yield "the machines differ: the ratio is theirs as much as the runs'"
    for record in (a, b):
        if record.status != "finished":
            yield f"{record.path} {how_ended(record)}"
        for other in record.passed_over:
            yield f"{other}, which is newer, has no steps; {record.path.name} is shown"
