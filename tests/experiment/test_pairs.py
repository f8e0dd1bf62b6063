"""The test of pairs and the screening, by the coin: what they say, how often they are wrong, how soon they can tell."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.random import Generator
from numpy.typing import NDArray

from lightning_accel.experiment.pair_schedule import Schedule
from lightning_accel.experiment.pair_test import PairTest, log_wealth
from lightning_accel.experiment.screening import PAIRS, LatestTimes, fastest, screen
from lightning_accel.search import heap_trial, judging
from lightning_accel.tuning.trial_scheduler import ALPHA

pytestmark = pytest.mark.numbers

Noise = Callable[[Generator, int], NDArray[np.float64]]


def heavy_tails(rng: Generator, turns: int) -> NDArray[np.float64]:
    return np.exp(0.03 * rng.standard_t(2, turns))


def drift(rng: Generator, turns: int) -> NDArray[np.float64]:
    return np.exp(np.cumsum(rng.normal(0, 0.02, turns)) + 0.03 * rng.standard_t(3, turns))


def periodic(rng: Generator, turns: int) -> NDArray[np.float64]:
    every_fourth, every_tenth = np.arange(turns) % 4 == 0, np.arange(turns) % 10 == 3
    return np.exp(0.03 * rng.standard_normal(turns) + 0.3 * every_fourth + 0.2 * every_tenth)


def two_speeds(rng: Generator, turns: int) -> NDArray[np.float64]:
    return np.exp(0.03 * rng.standard_normal(turns) + math.log(2) * (np.cumsum(rng.random(turns) < 0.1) % 2))


NOISES = (heavy_tails, drift, periodic, two_speeds)


# Who asks: the error that is allowed, and after how many pairs it is no longer asked.
USERS = {
    "the whole plan": (ALPHA / 2, 200),
    "one of three arms": (ALPHA / 6, 50),
    "an audit": (ALPHA / 4, 200),
    "a setup before a run": (ALPHA / 10, judging.MAX_PAIRS),
    "an allocator": (heap_trial.ALPHA, 60),
}


def simulated(gain: float, noise: Noise, *, alpha: float = 0.01, pairs: int = 120, seed: int = 0) -> tuple[str, int]:
    """What is said of a candidate that is faster by ``gain``, on a simulated machine, and after how many pairs."""
    test, schedule = PairTest(alpha), Schedule(seed)
    seconds = iter(noise(np.random.default_rng(seed), 2 * pairs))
    for _ in range(pairs):
        test.add(*schedule.pair(lambda: next(seconds) * (1 + gain), lambda: next(seconds)))
        if outcome := test.outcome():
            return outcome, len(test)
    return "", pairs


@pytest.mark.parametrize(("alpha", "pairs"), USERS.values(), ids=USERS)
def test_what_is_as_fast_is_hardly_ever_called_faster(alpha: float, pairs: int) -> None:
    """``alpha`` is what is allowed on average; three standard deviations more come up in one of 300 such tests."""
    runs = [simulated(0.0, noise, alpha=alpha, pairs=pairs, seed=seed) for noise in NOISES for seed in range(50)]
    expected = alpha * len(runs)
    assert sum(outcome == "faster" for outcome, _ in runs) <= expected + 3 * math.sqrt(expected) + 1


@pytest.mark.parametrize("noise", NOISES)
def test_what_is_slower_never_wins(noise: Noise) -> None:
    assert all(simulated(-0.05, noise, seed=seed)[0] != "faster" for seed in range(40))


@pytest.mark.parametrize("noise", NOISES)
def test_a_fifth_is_found(noise: Noise) -> None:
    outcomes = [simulated(0.2, noise, seed=seed) for seed in range(20)]
    assert sum(outcome == "faster" for outcome, _ in outcomes) >= 18


@pytest.mark.parametrize(("gain", "pairs"), [(0.05, 40), (0.2, 12)])
def test_larger_gains_show_sooner(gain: float, pairs: int) -> None:
    needed = [simulated(gain, heavy_tails, seed=seed)[1] for seed in range(20)]
    assert np.median(needed) <= pairs


def test_a_small_gain_is_found_in_many_pairs() -> None:
    outcomes = [simulated(0.02, heavy_tails, pairs=600, seed=seed)[0] for seed in range(10)]
    assert outcomes.count("faster") >= 8


def test_wealth_is_a_fair_game() -> None:
    """Under the null hypothesis the expected wealth after any number of pairs is the stake."""
    for pairs in (1, 7, 40):
        chances = [math.comb(pairs, above) / 2**pairs for above in range(pairs + 1)]
        expected = sum(p * math.exp(log_wealth(above, pairs)) for above, p in enumerate(chances))
        assert expected == pytest.approx(1.0)


def test_what_is_mostly_faster_but_slower_in_sum_does_not_win() -> None:
    test = PairTest(alpha=0.01)
    for at in range(40):
        test.add(1.0, 10.0 if at % 8 == 7 else 0.95)  # every eighth step compiles something
        assert at < 15 or test.outcome() == ""


def test_one_turn_that_the_machine_delays_hides_no_gain() -> None:
    test = PairTest(alpha=0.01)
    for at in range(20):
        test.add(1.0, 30.0 if at == 7 else 0.9)
    assert test.outcome() == "faster"


def test_a_machine_that_was_busy_at_the_beginning_hides_no_gain() -> None:
    test = PairTest(alpha=0.01)
    for at in range(60):
        test.add(4.0 if at < 10 else 1.0, (30.0 if at % 2 else 3.0) if at < 10 else 0.8)
    assert test.outcome() == "faster"


def test_a_gain_has_to_be_worth_what_was_asked_for() -> None:
    cheap, dear = PairTest(alpha=0.01), PairTest(alpha=0.01, worth=math.log(1.1))
    for _ in range(20):
        cheap.add(1.05, 1.0)
        dear.add(1.05, 1.0)
    assert cheap.outcome() == "faster"
    assert dear.outcome() == "not faster"


def test_the_interval_holds_the_true_gain() -> None:
    hits = 0
    for seed in range(50):
        rng, test = np.random.default_rng(seed), PairTest(alpha=0.01)
        for original, candidate in heavy_tails(rng, 60).reshape(30, 2):
            test.add(1.3 * original, candidate)
        interval = test.interval()
        hits += interval.low <= 1.3 <= interval.high
    assert hits >= 46


def test_few_pairs_bound_nothing() -> None:
    test = PairTest(alpha=0.01)
    test.add(1.2, 1.0)
    interval = test.interval()
    assert (interval.low, interval.high) == (0.0, math.inf)
    assert str(interval) == "1.20x (not decided)"
    assert str(PairTest(alpha=0.01).interval()) == "1.00x (not decided)"


# -- the coin ------------------------------------------------------------------------------------------------------


def test_coins_are_fair_and_follow_from_the_seed() -> None:
    orders = [tuple(Schedule(seed).order("AB")) for seed in range(400)]
    assert 160 <= orders.count(("A", "B")) <= 240
    assert orders == [tuple(Schedule(seed).order("AB")) for seed in range(400)]
    assert {tuple(Schedule(seed).order("ABC")) for seed in range(100)} == set(itertools.permutations("ABC"))


def test_coins_follow_from_the_run_and_differ_between_its_comparisons() -> None:
    before = torch.get_rng_state()
    orders = ["".join("".join(Schedule().order("AB")) for _ in range(20)) for _ in range(5)]
    assert len(set(orders)) == 5
    assert torch.equal(torch.get_rng_state(), before)


def test_no_streams_of_the_user_s_are_touched() -> None:
    before = random.getstate()
    Schedule().order("AB")
    assert random.getstate() == before


# -- screening -----------------------------------------------------------------------------------------------------


def share(outcome: str, speed: float, noise: float) -> float:
    """How often a screening by two pairs says that of a candidate of that speed: docs/statistics.md has the table."""
    rng = np.random.default_rng(0)
    seconds = np.exp(noise * rng.standard_t(3, (4000, 2, PAIRS))).min(axis=-1)
    return float(np.mean([screen(original, candidate / speed) == outcome for original, candidate in seconds]))


@pytest.mark.parametrize(
    ("speed", "noise", "faster", "slower"),
    [
        *((0.9, 0.01, 0.00, 0.99), (1.0, 0.01, 0.05, 0.05), (1.1, 0.01, 0.99, 0.00)),
        *((0.9, 0.03, 0.02, 0.93), (1.0, 0.03, 0.25, 0.26), (1.1, 0.03, 0.91, 0.02)),
    ],
)
def test_a_screening_errs_as_often_as_it_says(speed: float, noise: float, faster: float, slower: float) -> None:
    assert share("faster", speed, noise) == pytest.approx(faster, abs=0.02)
    assert share("slower", speed, noise) == pytest.approx(slower, abs=0.02)


def test_the_fastest_is_the_first_that_is_not_clearly_slower() -> None:
    assert fastest({1: [1.3, 1.02], 2: [1.0], 4: [0.999]}) == 1
    assert fastest({1: [1.2], 2: [1.02], 4: [1.0, 9.0]}) == 2


def test_steps_have_drifted_once_they_take_a_fifth_more_than_the_first_did() -> None:
    latest = LatestTimes()
    assert not latest.have_drifted
    for seconds, expected in ((1.0, False), (1.15, False), (1.25, True), (1.0, False)):
        for _ in range(16):
            latest.append(seconds)
        assert latest.have_drifted is expected
