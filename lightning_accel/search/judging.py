"""Two setups beside each other: which is better by what the user asked for, and how sure that is."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from lightning_accel.search.runs import Run
from lightning_accel.search.setup import Setup
from lightning_accel.search.worker import Block
from lightning_accel.tuning.comparison import LEAST_RISE_BYTES, MEMORY_RISE, Result, Verdict
from lightning_accel.tuning.pairs import PairTest

Objective = Literal["speed", "memory", "balanced"]
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)

MEMORY_WEIGHT: Mapping[Objective, float] = {"speed": 0.0, "balanced": 1.0, "memory": 4.0}
"""How many percent of time one percent of memory is worth."""

MIN_PAIRS = 14  # that can prove anything, a bad pair among them
MAX_PAIRS = 60
_BLOCK_S = 0.1  # a block of turns takes at least that long
_MIN_TURNS = 2  # of a block


@dataclass(frozen=True)
class Facts:
    """What is known of a setup that has run.

    Attributes:
        started_s: From nothing to a few turns, in seconds; with a compiler, what it took.
        seconds: For a sample.
        waited: The share of the time that it waited for data.
        peak_bytes: The most memory that it held.
        base_bytes: What it held before its first step.
        samples: In a turn.
        batches: In an epoch.
    """

    started_s: float
    seconds: float
    waited: float
    peak_bytes: int
    base_bytes: int
    samples: float
    batches: float

    @classmethod
    def of(cls, run: Run) -> Facts:
        """Of a run that has just begun: it goes on for a few turns.

        Raises:
            lightning_accel.search.runs.RunError: It has ended.
        """
        first = run.block(_MIN_TURNS)
        turns = _turns_in(_BLOCK_S, first.seconds / _MIN_TURNS)
        block = run.block(turns)
        return cls(
            started_s=run.ready.started_s,
            seconds=block.seconds / block.samples,
            waited=block.waited_s / block.seconds,
            peak_bytes=max(first.peak_bytes, block.peak_bytes),
            base_bytes=run.ready.base_bytes,
            samples=block.samples / turns,
            batches=run.ready.batches,
        )

    @property
    def turn_s(self) -> float:
        return self.seconds * self.samples

    @property
    def block_turns(self) -> int:
        """Turns of a block that is long enough to be timed."""
        return _turns_in(_BLOCK_S, self.turn_s)

    def block_s(self, settle: int) -> float:
        return self.turn_s * (self.block_turns + settle)


def _turns_in(seconds: float, turn_s: float) -> int:
    return max(_MIN_TURNS, math.ceil(seconds / turn_s))


def worth_of_memory(original: Facts, candidate: Facts, objective: Objective) -> float:
    """By how much the candidate has to be faster, as a log of a ratio, for the memory that it takes.

    Below 0: it may be slower by that.
    """
    rise = candidate.peak_bytes - original.peak_bytes
    if abs(rise) <= max(MEMORY_RISE * original.peak_bytes, LEAST_RISE_BYTES):
        return 0.0
    return MEMORY_WEIGHT[objective] * math.log(candidate.peak_bytes / original.peak_bytes)


def worth_of_start(original: Facts, candidate: Facts, samples: float) -> float:
    """By how much the candidate has to be faster, as a log of a ratio, to pay for its start in a run of ``samples``."""
    share = (candidate.started_s - original.started_s) / (samples * original.seconds)
    return -math.log1p(-share) if 0 < share < 1 else 0.0 if share <= 0 else math.inf


def settling_turns(setup: Setup, accumulate: int) -> int:
    """Turns after a pause that do not count: their batches were loaded while nobody trained."""
    workers = int(setup.loader.get("num_workers") or 0)
    return 1 + math.ceil(workers * int(setup.loader.get("prefetch_factor") or 2) / accumulate)


class Duel:
    """Pairs of blocks, one of each run, in an order that a coin decides.

    Args:
        name: For the result.
        sides: The original and the candidate, with what is known of each.
        settle: Turns of each after a pause that do not count.
        test: What judges the pairs.
        max_pairs: After so many nothing can be told.
    """

    def __init__(
        self,
        name: str,
        sides: Sequence[tuple[Run, Facts]],
        *,
        settle: tuple[int, int],
        test: PairTest,
        max_pairs: int,
    ) -> None:
        self.name = name
        self._sides, self._settle = sides, settle
        self._test, self._max_pairs = test, max_pairs
        self._turns = 0

    def pair(self) -> Result | None:
        """Runs one pair; how it ended, or None while nothing is told.

        Raises:
            lightning_accel.search.runs.RunError: One of them has ended.
        """
        first = random.Random(f"{self.name}, pair {len(self._test)}").randrange(2)
        seconds = [0.0, 0.0]
        for side in (first, 1 - first):
            run, facts = self._sides[side]
            run.block(self._settle[side])
            block: Block = run.block(facts.block_turns)
            seconds[side] = block.seconds / block.samples
            self._turns += facts.block_turns
        self._test.add(*seconds)
        verdict: Verdict | Literal[""] = self._test.outcome()
        if not verdict and len(self._test) >= self._max_pairs:
            verdict = "cannot tell"
        return self.result(verdict) if verdict else None

    def result(self, verdict: Verdict) -> Result:
        """As it stands."""
        return Result(self.name, verdict, self._test.interval(), self._turns)
