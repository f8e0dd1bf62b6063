"""Which allocator trains fastest here: a stand-in for a training takes turns under each, in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_accel.core.allocators import Allocator
from lightning_accel.core.clocks import Deadline
from lightning_accel.experiment.pair_schedule import Schedule
from lightning_accel.experiment.pair_test import PairTest, price_of_memory

ALPHA = 0.01
"""Of 100 machines on which none is faster, at most one gets another than it has."""

_WARM_UP_TURNS = 4
_MIN_PAIRS, _MAX_PAIRS = 20, 60  # fewer can hardly prove anything: they are taken, though the time may be over
_PATIENCE_S = 180.0  # until a process has imported torch and is warm, on a machine that has more to do


@dataclass(frozen=True)
class HeapResult:
    """What the trial has come to."""

    name: str  # of the allocator that has won; empty: none is faster for sure than what the program has by itself
    environment: Mapping[str, str]  # the variables that choose it
    table: tuple[str, ...]  # a line for each that was tried
    is_sure: bool  # whether every comparison has told something in its time


@dataclass(frozen=True)
class _Told:
    seconds: float
    faults: int
    peak_bytes: int


class _HeapProcess:
    """The stand-in under one allocator."""

    latest: _Told  # its latest answer

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._popen = subprocess.Popen(
            [sys.executable, "-c", "from lightning_accel.search.toy_training import main; main()"],
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def ask(self, turns: int) -> None:
        """Has it take turns; :meth:`answer` waits for them.

        Raises:
            OSError: It has ended.
        """
        assert self._popen.stdin is not None
        self._popen.stdin.write(f"{turns}\n")
        self._popen.stdin.flush()

    def answer(self) -> _Told:
        """What the turns took.

        Raises:
            OSError: It has ended.
        """
        assert self._popen.stdout is not None
        line = self._popen.stdout.readline()
        if not line:
            raise OSError(f"its process ended with status {self._popen.wait()}")
        self.latest = _Told(**json.loads(line))
        return self.latest

    def turn(self) -> float:
        self.ask(1)
        return self.answer().seconds

    def kill(self) -> None:
        self._popen.kill()

    def close(self) -> None:
        self._popen.kill()
        self._popen.wait()
        for pipe in (self._popen.stdin, self._popen.stdout):
            assert pipe is not None
            pipe.close()


def try_heaps(heaps: Sequence[Allocator], seconds: float) -> HeapResult:
    """Compares each with the best so far, by pairs of turns in an order that a coin decides; none is the first best.

    What needs more memory has to be a tenth faster, as in live trials.

    ``seconds`` are for all comparisons together, once the processes are warm.

    Raises:
        OSError: The stand-in does not run, or not in time.
    """
    plain = Allocator("", {})
    running: dict[str, _HeapProcess] = {}

    def give_up() -> None:
        for one in running.values():
            one.kill()

    deadline = threading.Timer(_PATIENCE_S + 2 * seconds, give_up)
    deadline.start()
    try:
        for heap in (plain, *heaps):
            running[heap.name] = _HeapProcess(heap.environment)
            running[heap.name].ask(_WARM_UP_TURNS)
        table, best, is_sure = [], plain, True
        running[""].answer()
        for heap in heaps:
            beside = best.name or "as it is"
            try:
                running[heap.name].answer()
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
    finally:
        deadline.cancel()
        for one in running.values():
            one.close()


def _compared(original: _HeapProcess, candidate: _HeapProcess, seconds: float) -> PairTest:
    test = PairTest(ALPHA, price_of_memory(original.latest.peak_bytes, candidate.latest.peak_bytes))
    schedule, deadline = Schedule(), Deadline(seconds)
    while not test.outcome() and len(test) < _MAX_PAIRS and (len(test) < _MIN_PAIRS or not deadline.is_over()):
        test.add(*schedule.pair(original.turn, candidate.turn))
    return test
