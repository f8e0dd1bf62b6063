"""The comparison of two setups: which one is better for the user's objective, and with what certainty."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from lightning_accel.experiment.pair_schedule import Schedule
from lightning_accel.experiment.pair_test import LEAST_RISE_BYTES, MEMORY_RISE, PairTest
from lightning_accel.experiment.subprocess_runner import SubprocessError, Worker
from lightning_accel.search.worker import Block, Failed, Ready
from lightning_accel.tuning.comparison import Result

Objective = Literal["speed", "memory", "balanced"]
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)

MEMORY_WEIGHT: Mapping[Objective, float] = {"speed": 0.0, "balanced": 1.0, "memory": 4.0}
"""The percent of time that one percent of memory is worth."""

MIN_PAIRS = 14
"""The fewest that can prove anything, with one bad pair. Without time for so many, nothing is compared."""

MAX_PAIRS = 60
_BLOCK_S = 0.1  # the least seconds of a block of turns
_OTHER_MEMORY, _OTHER_TIME = 0.25, 4.0  # a share and a factor: runs that differ by more are different
_FIRST_TURNS = 2  # turns from which the length of a turn is estimated


class TrialRun:
    """One training under a setup, which waits between two blocks of turns.

    Raises:
        SubprocessError: The training does not start or, in a method, has ended.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.is_over = False  # whether it has ended
        self.ready: Ready = self._answer()  # its message once it was warm
        self.most_bytes: int = self.ready.peak_bytes  # peak memory, including the first steps

    def block(self, turns: int) -> Block:
        """Trains for so many turns."""
        self._worker.send(turns)
        answer: Block = self._answer()
        self.most_bytes = max(self.most_bytes, answer.peak_bytes)
        return answer

    def close(self) -> None:
        """Ends the run, and waits until its memory is free."""
        self.is_over = True
        self._worker.end()

    def _answer(self) -> Any:
        try:
            answer = self._worker.answer()
            if isinstance(answer, Failed):
                raise SubprocessError(answer.message, is_memory=answer.is_memory)
        except SubprocessError:
            self.is_over = True
            raise
        return answer


@dataclass(frozen=True)
class Facts:
    """The measurements of a setup that has run."""

    started_s: float  # seconds from the start to the first few turns, compilation included
    seconds: float  # for a sample
    waited: float  # the share of the time spent waiting for data
    peak_bytes: int  # peak memory once the run was warm
    base_bytes: int  # memory before the first step
    samples: float  # in a turn
    batches: float  # in an epoch
    most_bytes: int = 0  # peak memory of the whole run, including its first steps and later batches

    @property
    def needed_bytes(self) -> int:
        """Returns the memory that the setup needs."""
        return max(self.peak_bytes, self.most_bytes)

    @classmethod
    def of(cls, run: TrialRun) -> Facts:
        """Measures a run that has just begun, during a few more turns. Raises the errors of :meth:`TrialRun.block`."""
        first = run.block(_FIRST_TURNS)
        turns = max(1, math.ceil(_BLOCK_S / (first.seconds / _FIRST_TURNS)))
        block = run.block(turns)
        return cls(
            started_s=run.ready.started_s,
            seconds=block.seconds / block.samples,
            waited=block.waited_s / block.seconds,
            peak_bytes=max(first.peak_bytes, block.peak_bytes),
            base_bytes=run.ready.base_bytes,
            samples=block.samples / turns,
            batches=run.ready.batches,
            most_bytes=run.most_bytes,
        )

    def is_like(self, other: Facts) -> bool:
        """Returns whether both may describe the same run, on a machine that is sometimes busy."""
        same_size = self.samples == other.samples and abs(self.peak_bytes / other.peak_bytes - 1) < _OTHER_MEMORY
        return same_size and 1 / _OTHER_TIME < self.seconds / other.seconds < _OTHER_TIME

    @property
    def turn_s(self) -> float:
        return self.seconds * self.samples

    @property
    def block_turns(self) -> int:
        """Returns the number of turns of a block that is long enough to be timed."""
        return max(1, math.ceil(_BLOCK_S / self.turn_s))

    def settling_turns(self, loader: Mapping[str, Any], accumulate: int) -> int:
        """Returns the turns after a pause that do not count: caches are cold, and workers have loaded batches ahead."""
        workers = int(loader.get("num_workers") or 0)
        loaded = math.ceil(workers * int(loader.get("prefetch_factor") or 2) / accumulate)
        return loaded + (self.turn_s < _BLOCK_S)

    def block_s(self, settle: int) -> float:
        """Returns the seconds of a block, including the turns before it that do not count."""
        return self.turn_s * (self.block_turns + settle)


def worth_of_memory(original: Facts, candidate: Facts, objective: Objective) -> float:
    """Returns the gain, as a log of a ratio, that the candidate needs to justify its memory.

    If it is negative, the candidate may be slower by that much.
    """
    rise = candidate.peak_bytes - original.peak_bytes
    if abs(rise) <= max(MEMORY_RISE * original.peak_bytes, LEAST_RISE_BYTES):
        return 0.0
    return MEMORY_WEIGHT[objective] * math.log(candidate.peak_bytes / original.peak_bytes)


def worth_of_start(original: Facts, candidate: Facts, samples: float) -> float:
    """Returns the gain, as a log of a ratio, that the candidate needs to recover its start in a run of ``samples``."""
    share = (candidate.started_s - original.started_s) / (samples * original.seconds)
    return -math.log1p(-share) if 0 < share < 1 else 0.0 if share <= 0 else math.inf


@dataclass(frozen=True)
class SetupSide:
    """One side of a comparison."""

    run: TrialRun
    facts: Facts  # its measurements
    settle: int  # turns after a pause that do not count

    def seconds(self) -> float:
        """Returns the seconds for a sample, on a block of turns. Raises the errors of :meth:`TrialRun.block`."""
        if self.settle:
            self.run.block(self.settle)
        block = self.run.block(self.facts.block_turns)
        return block.seconds / block.samples


def judged(name: str, original: SetupSide, candidate: SetupSide, test: PairTest, seconds: float) -> Result:
    """Compares pairs of blocks, in a random order, until ``test`` is decided or ``seconds`` are over.

    Raises:
        SubprocessError: One of the runs has ended.
    """
    pair_s = sum(side.facts.block_s(side.settle) for side in (original, candidate))
    max_pairs = min(MAX_PAIRS, max(MIN_PAIRS, int(seconds / pair_s)))
    schedule = Schedule()
    while len(test) < max_pairs and not test.outcome():
        test.add(*schedule.pair(original.seconds, candidate.seconds))
    turns = len(test) * (original.facts.block_turns + candidate.facts.block_turns)
    return Result(name, test.outcome() or "cannot tell", test.interval(), turns)
