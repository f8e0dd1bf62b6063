"""Arms with several choices, on a simulated machine: the best one is found, wherever it stands."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from support.simulated_machine import SimulatedRun

BACKENDS = {"first": 1.05, "second": 1.4, "third": 1.2}


def rotated(choices: Mapping[str, float], by: int) -> dict[str, float]:
    pairs = list(choices.items())
    return dict(pairs[by:] + pairs[:by])


@pytest.mark.parametrize("by", range(3))
def test_the_best_of_three_is_found_wherever_it_stands(by: int) -> None:
    run = SimulatedRun({"backend": rotated(BACKENDS, by)})
    tuning = run.run()
    assert tuning.choices == {"backend": "second"}
    assert run.now == {"backend": "second"}


def test_the_line_measures_the_choice_that_holds_against_plain() -> None:
    tuning = SimulatedRun({"backend": BACKENDS}, seed=1).run()
    assert tuning.whole is not None
    assert tuning.whole.interval.low <= 1.4 <= tuning.whole.interval.high


def test_the_second_is_found_where_the_first_is_slower_than_plain() -> None:
    assert SimulatedRun({"backend": {"first": 0.8, "second": 1.3, "third": 1.0}}).run().choices == {"backend": "second"}


def test_every_choice_has_its_line_in_the_table() -> None:
    tuning = SimulatedRun({"backend": BACKENDS}).run()
    assert [line.split()[0] for line in tuning.table().splitlines()] == [
        "whole",
        "backend",
        "backend=second",
        "backend=third",
        "audit",
    ]


def test_none_of_three_is_chosen_where_none_is_faster() -> None:
    wins = [
        bool(SimulatedRun({"backend": {"a": 1.0, "b": 1.0, "c": 1.0}}, 400, seed=seed).run().choices)
        for seed in range(30)
    ]
    assert sum(wins) <= 1  # at most 1 of 100 on average


def test_a_choice_is_found_beside_other_arms() -> None:
    tuning = SimulatedRun({"layout": 0.95, "backend": BACKENDS, "copies": 1.3}).run()
    assert tuning.choices == {"backend": "second", "copies": "on"}


def test_the_arm_that_gained_least_is_taken_back_first_whatever_choice_of_it_holds() -> None:
    """From the 300th turn on all is slower than plain. The arm of which the first choice lost is not the least."""
    run = SimulatedRun({"backend": {"first": 0.9, "second": 1.5}, "copies": 1.2}, 2000)
    trials = run.trials()
    for turn in range(run.turns):
        if trials.tuning.is_settled and turn > 300:
            run.speedups = {"backend": {}, "copies": {}}
            run.slowdown = lambda turn: 2.0 if {*run.now.values()} == {"off"} else 2.2
        trials.begin()
        trials.took(run.step(turn))
    taken_back = [line.split()[0] for line in run.lines if "is taken back" in line]
    assert taken_back == ["copies", "backend"]
