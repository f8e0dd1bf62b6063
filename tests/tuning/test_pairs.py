"""The anytime-valid test of pairs: what it proves, how often it is wrong, and how soon it can tell."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from numpy.random import Generator
from numpy.typing import NDArray

from lightning_accel.tuning.pairs import PairTest, log_wealth

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


def simulated(gain: float, noise: Noise, *, pairs: int = 120, seed: int = 0) -> tuple[str, int]:
    """What is said of a candidate that is faster by ``gain``, on a simulated machine, and after how many pairs."""
    rng, test = np.random.default_rng(seed), PairTest(alpha=0.01)
    seconds = noise(rng, 2 * pairs)
    for at in range(pairs):
        turns = seconds[2 * at : 2 * at + 2]
        original, candidate = turns[:: 1 if rng.random() < 0.5 else -1]
        test.add(original * (1 + gain), candidate)
        if outcome := test.outcome():
            return outcome, at + 1
    return "", pairs


@pytest.mark.parametrize("noise", NOISES)
def test_what_is_as_fast_is_hardly_ever_called_faster(noise: Noise) -> None:
    outcomes = [simulated(0.0, noise, seed=seed)[0] for seed in range(100)]
    assert outcomes.count("faster") <= 4  # 1 is what is allowed on average; 5 of 100 come up in one of 300 such tests


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
    assert test.outcome() == ""


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
