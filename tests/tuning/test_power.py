"""How soon live trials can tell, and how seldom they are wrong, on a simulated machine with heavy-tailed noise."""

from __future__ import annotations

import statistics

import pytest

from lightning_accel.tuning.tuning_result import Tuning
from support.simulated_machine import SimulatedRun


def settled(speedups: dict[str, float], turns: int, *, noise: float, runs: int) -> list[Tuning]:
    """What so many runs come to, of which a layout's switch costs a turn."""
    settle = {"layout": 1}
    return [SimulatedRun(speedups, turns, noise=noise, seed=seed, settle=settle).run() for seed in range(runs)]


@pytest.mark.parametrize("noise", [0.03, 0.05])
def test_a_gain_of_a_ninth_is_found_in_400_turns_though_its_switch_is_dear(noise: float) -> None:
    found = settled({"layout": 1.11}, 400, noise=noise, runs=100)
    assert sum(bool(tuning.choices) for tuning in found) >= 80


@pytest.mark.medium
@pytest.mark.parametrize("noise", [0.03, 0.05])
def test_it_is_found_beside_arms_that_gain_nothing(noise: float) -> None:
    found = settled({"layout": 1.11, "copies": 1.0, "attention": 1.0}, 400, noise=noise, runs=100)
    assert sum("layout" in tuning.choices for tuning in found) >= 80


def test_a_plan_that_won_as_a_whole_holds_where_no_arm_can_be_told_by_itself() -> None:
    found = settled({"layout": 1.06, "copies": 1.06, "attention": 1.06}, 150, noise=0.05, runs=20)
    won = [tuning for tuning in found if tuning.results["whole plan"].is_won]
    assert len(won) >= 10
    assert all(tuning.is_proven for tuning in won if tuning.is_settled)
    assert any(len(tuning.choices) == 3 for tuning in won)


@pytest.mark.medium
def test_of_runs_in_which_nothing_is_faster_hardly_any_ends_with_a_winner() -> None:
    found = settled({"layout": 1.0, "copies": 1.0, "attention": 1.0}, 300, noise=0.04, runs=300)
    assert sum(bool(tuning.choices) for tuning in found) <= 6  # 3 is what is allowed on average


def test_what_shows_no_promise_ends_at_its_share_of_the_run() -> None:
    spent = [tuning.results["whole plan"].turns for tuning in settled({"copies": 1.0}, 400, noise=0.04, runs=50)]
    share = statistics.mode(spent)
    assert share <= 100  # a quarter
    assert sum(turns <= share for turns in spent) >= 40


def test_what_shows_promise_goes_on_to_half_of_the_run() -> None:
    spent = [tuning.results["whole plan"] for tuning in settled({"copies": 1.03}, 400, noise=0.05, runs=20)]
    longest = max(result.turns for result in spent)
    assert 100 < longest <= 200
    assert any(result.is_won and result.turns > 100 for result in spent)
