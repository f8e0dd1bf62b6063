"""Two runs beside each other, on simulated clocks: real ones are in test_tune.py."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import pytest

from lightning_accel.experiment.pair_test import PairTest
from lightning_accel.search.judging import (
    MAX_PAIRS,
    Facts,
    SetupSide,
    TrialRun,
    judged,
    worth_of_memory,
    worth_of_start,
)
from lightning_accel.search.worker import Block
from lightning_accel.tuning.comparison import Result

FACTS = Facts(started_s=1.0, seconds=0.02, waited=0.0, peak_bytes=1 << 30, base_bytes=0, samples=8, batches=math.inf)


@dataclass(eq=False)
class SimulatedRun:
    """Trains at so many seconds a sample, give or take, without training."""

    seconds: float
    noise: np.random.Generator
    turns: int = 0

    def block(self, turns: int) -> Block:
        self.turns += turns
        seconds = self.seconds * 8 * turns * math.exp(0.05 * self.noise.standard_normal())
        return Block(seconds, 0.0, 8 * turns, 1 << 30)


def compared(original: float, candidate: float, *, worth: float = 0.0, seed: int = 0) -> Result:
    # Each side has its own noise. From one stream, the order of the sides, which is random, would decide.
    runs = [SimulatedRun(seconds, np.random.default_rng((seed, i))) for i, seconds in enumerate((original, candidate))]
    sides = [SetupSide(cast(TrialRun, run), FACTS, 1) for run in runs]
    return judged("candidate", *sides, PairTest(0.001, worth), 1e6)


def test_what_takes_less_time_for_a_sample_is_faster() -> None:
    result = compared(0.02, 0.01)
    assert result.is_won
    assert result.interval.low < 2 < result.interval.high


def test_what_takes_more_is_refused_in_a_few_pairs() -> None:
    result = compared(0.01, 0.02)
    assert result.verdict == "not faster"
    assert result.turns < 2 * FACTS.block_turns * 10


def test_equals_cannot_be_told_apart_and_end() -> None:
    verdicts = [compared(0.01, 0.01, seed=seed) for seed in range(20)]
    assert not any(result.is_won for result in verdicts)
    assert max(result.turns for result in verdicts) <= 2 * FACTS.block_turns * MAX_PAIRS


def test_half_of_the_memory_is_worth_twice_the_time_where_they_are_balanced() -> None:
    half = replace(FACTS, peak_bytes=FACTS.peak_bytes // 2)
    assert worth_of_memory(FACTS, half, "speed") == 0.0
    assert worth_of_memory(FACTS, half, "balanced") == pytest.approx(-math.log(2))
    assert worth_of_memory(FACTS, half, "memory") == pytest.approx(-4 * math.log(2))


def test_what_is_slower_wins_where_it_may_be() -> None:
    assert not compared(0.010, 0.015).is_won
    assert compared(0.010, 0.015, worth=-math.log(2)).is_won


def test_a_few_mebibytes_are_no_difference() -> None:
    more = replace(FACTS, peak_bytes=FACTS.peak_bytes + (4 << 20))
    assert worth_of_memory(FACTS, more, "memory") == 0.0


def test_a_start_has_to_be_won_back_in_the_rest_of_the_run() -> None:
    compiled = replace(FACTS, started_s=21.0)
    # 10,000 samples take 200 s: a tenth of that is what it costs to compile.
    assert worth_of_start(FACTS, compiled, 10_000) == pytest.approx(math.log(200 / 180))
    assert worth_of_start(FACTS, compiled, 500) == math.inf
    assert worth_of_start(FACTS, compiled, math.inf) == 0.0


@pytest.mark.parametrize(
    ("loader", "turns"), [({}, 0), ({"num_workers": 2}, 4), ({"num_workers": 2, "prefetch_factor": 4}, 8)]
)
def test_batches_that_were_loaded_in_a_pause_do_not_count(loader: dict[str, Any], turns: int) -> None:
    assert FACTS.settling_turns(loader, accumulate=1) == turns


def test_short_turns_are_timed_in_longer_blocks_and_not_right_after_a_pause() -> None:
    short = replace(FACTS, seconds=0.001)
    assert short.block_turns == math.ceil(0.1 / 0.008)
    assert short.settling_turns({}, accumulate=1) == 1


@pytest.mark.parametrize(
    ("change", "is_like"),
    [
        ({}, True),
        ({"seconds": 0.05}, True),
        ({"seconds": 0.2}, False),
        ({"samples": 16}, False),
        ({"peak_bytes": 2 << 30}, False),
    ],
)
def test_a_run_that_has_become_another_is_noticed(change: dict[str, Any], is_like: bool) -> None:
    assert replace(FACTS, **change).is_like(FACTS) == is_like
