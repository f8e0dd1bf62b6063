"""Which settings of a loader are tried in which epoch, and which stay."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, replace

from lightning_accel.experiment.screening import screen

LEAST_WAIT = 0.05
"""Of the time: who waits for less data gains nothing by loading it sooner."""

MOST_WORKERS = 16
_MORE_PREFETCH = 4


@dataclass(frozen=True)
class LoaderWorkers:
    """How a loader loads."""

    count: int = 0  # in how many processes; 0: in that of the training
    prefetch: int = 2  # how many batches each of them has ready
    is_kept: bool = False  # whether they are kept from epoch to epoch

    def __str__(self) -> str:
        if not self.count:
            return "no workers"
        kept = ", persistent_workers=True" if self.is_kept else ""
        return f"num_workers={self.count}, prefetch_factor={self.prefetch}{kept}"


@dataclass(frozen=True)
class WorkerCost:
    """What an epoch took."""

    batch_s: float  # seconds from batch to batch, waiting included
    waited: float  # the share of them that it waited for data
    start: float  # the share of the epoch that it waited for its first batch: workers have to be started

    @property
    def running_s(self) -> float:
        """Seconds from batch to batch, once the first has come."""
        return self.batch_s * (1 - self.start)


Course = Generator[LoaderWorkers, WorkerCost, LoaderWorkers]
"""Yields what the next epoch is to load with, is sent what that took, and returns what to stay with."""


def course(own: LoaderWorkers, cores: int) -> Course:
    """Workers are added while that is faster, then kept, then given more batches to have ready.

    Where the user has workers already, their number stays: what they draw at random cannot be seen from here.
    """
    best, cost = own, (yield own)
    before = cost
    if cost.waited < LEAST_WAIT:
        return best
    if not own.count:
        # A core is left to the training. More than there are cores, too: what waits for a disk computes nothing.
        first = count = max(1, min(cores - 1, MOST_WORKERS // 2))
        while count <= MOST_WORKERS and cost.waited >= LEAST_WAIT:
            tried = yield replace(own, count=count)
            if screen(cost.running_s, tried.running_s) != "faster":
                break
            best, cost, count = replace(own, count=count), tried, 2 * count
        if best.count <= first > 1 and cost.waited >= LEAST_WAIT:
            tried = yield replace(own, count=first // 2)
            if screen(cost.running_s, tried.running_s) == "faster":
                best, cost = replace(own, count=first // 2), tried
        if not best.count:
            return own
        if cost.start >= LEAST_WAIT:
            yield replace(best, is_kept=True)  # which starts them once more: what that saves, the next epoch shows
            tried = yield replace(best, is_kept=True)
            if _is_faster(tried, cost):
                best, cost = replace(best, is_kept=True), tried
    if cost.waited >= LEAST_WAIT and best.prefetch < _MORE_PREFETCH:
        tried = yield replace(best, prefetch=_MORE_PREFETCH)
        if _is_faster(tried, cost):
            best, cost = replace(best, prefetch=_MORE_PREFETCH), tried
    return best if best == own or _is_faster(cost, before) else own


def _is_faster(one: WorkerCost, other: WorkerCost) -> bool:
    return screen(other.batch_s, one.batch_s) == "faster"
