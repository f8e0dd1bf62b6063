"""Finds the allocator that trains fastest here: a small training takes turns under each, in separate processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from lightning_accel.core.allocators import Allocator
from lightning_accel.core.clocks import Deadline
from lightning_accel.experiment.pair_schedule import Schedule
from lightning_accel.experiment.pair_test import PairTest, price_of_memory
from lightning_accel.experiment.subprocess_runner import SubprocessError, Worker

ALPHA = 0.01
"""The error rate: of 100 machines on which no allocator is faster, at most one gets another allocator."""

_WARM_UP_TURNS = 4
_MIN_PAIRS, _MAX_PAIRS = 20, 60  # fewer pairs prove little, so the minimum is run even if the time is over
_PATIENCE_S = 180.0  # for a process to import torch and warm up, on a busy machine


@dataclass(frozen=True)
class HeapResult:
    """The result of the trial."""

    name: str  # the allocator that has won; empty if none is certainly faster than the default
    environment: Mapping[str, str]  # the variables that select it
    table: tuple[str, ...]  # a line for each allocator
    is_sure: bool  # whether every comparison was decided in its time


@dataclass(frozen=True)
class _Told:
    seconds: float
    faults: int
    peak_bytes: int


class _HeapProcess(Worker):
    """The small training under one allocator."""

    latest: _Told  # its latest answer

    def __init__(self, environment: Mapping[str, str], deadline: Deadline) -> None:
        program = "from lightning_accel.search.toy_training import main; main()"
        super().__init__(program, environment=environment, patience_s=_PATIENCE_S)
        self._deadline = deadline

    def turn(self, turns: int = 1) -> float:
        """Runs turns in the process. Returns the seconds of one turn."""
        if self._deadline.is_over():
            raise SubprocessError("the time was over before enough was measured")
        self.latest = _Told(**self.ask(turns))
        return self.latest.seconds


def try_heaps(heaps: Sequence[Allocator], seconds: float) -> HeapResult:
    """Compares each allocator with the best one so far, by randomly ordered pairs of turns; the default is first.

    An allocator that needs more memory must be a tenth faster, as in live trials. ``seconds`` limits all comparisons
    together, after the processes are warm.

    Raises:
        OSError: The small training does not run, or not in time.
    """
    plain = Allocator("", {})
    deadline = Deadline(_PATIENCE_S + 2 * seconds)
    with ExitStack() as ends:
        running = {heap.name: ends.enter_context(_HeapProcess(heap.environment, deadline)) for heap in (plain, *heaps)}
        table, best, is_sure = [], plain, True
        running[""].turn(_WARM_UP_TURNS)
        for heap in heaps:
            beside = best.name or "as it is"
            try:
                running[heap.name].turn(_WARM_UP_TURNS)
                test = _compared(running[best.name], running[heap.name], seconds / len(heaps))
            except OSError as error:
                table.append(f"{heap.name}: {error}")
                continue
            told = running[heap.name].latest
            table.append(
                f"{heap.name}: {test.outcome() or 'cannot tell'}: {test.interval()} beside {beside},"
                f" {len(test)} pairs; {told.faults:,} page faults a step, {told.peak_bytes / 2**20:,.0f} MiB"
            )
            best = heap if test.outcome() == "faster" else best
            is_sure = is_sure and bool(test.outcome())
        return HeapResult(best.name, best.environment, tuple(table), is_sure)


def _compared(original: _HeapProcess, candidate: _HeapProcess, seconds: float) -> PairTest:
    test = PairTest(ALPHA, price_of_memory(original.latest.peak_bytes, candidate.latest.peak_bytes))
    schedule, deadline = Schedule(), Deadline(seconds)
    while not test.outcome() and len(test) < _MAX_PAIRS and (len(test) < _MIN_PAIRS or not deadline.is_over()):
        test.add(*schedule.pair(original.turn, candidate.turn))
    return test
