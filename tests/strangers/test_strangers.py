"""Trainings as other people write them: with the plugin they are the runs that they are without it.

The whole table takes minutes (``make test-strangers``); a dozen of it, each in the way that tells the most, is quick.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from strangers.cases import CASES, differs
from strangers.differences import differences
from strangers.harness import DEFAULTS, DETERMINISTIC, NUDGED, PLAIN, TRUE, UNTUNED, plain, run
from strangers.table import Training, read_all

pytestmark = pytest.mark.numbers

TRAININGS = read_all()

QUICK = [
    ("gan_that_keeps_its_last_fake_for_the_next_step", "defaults, switching"),
    ("cyclegan_with_an_image_pool", "defaults"),
    ("simclr", "32-true"),
    ("moco_with_a_queue", "plain, resumed in 32-true"),
    ("dropout_on_the_images", "32-true, switching"),
    ("vit_with_dropout_on_patches", "32-true"),
    ("attention_followed_by_dropout", "32-true"),
    ("gnn_with_index_add", "defaults"),
    ("arcface_that_moves_its_own_weight", "defaults"),
    ("lookahead_without_super_init", "32-true, resumed plain"),
    ("gradients_viewed_flat_after_backward", "32-true"),
    ("truncated_backpropagation_with_a_carried_state", "defaults, switching"),
    ("quantisation_aware_with_observers_that_grow", "32-true"),
    ("outputs_read_by_numpy_in_a_callback", "defaults"),
]


def _each() -> list[object]:
    return [
        pytest.param(training, case, id=f"{name}-{case}", marks=[] if (name, case) in QUICK else [pytest.mark.slow])
        for name, training in TRAININGS.items()
        for case in CASES
        if training.resumes or "resumed" not in case
    ]


def _steady() -> list[object]:
    quick = [("vit_with_dropout_on_patches", UNTUNED), ("dropout_on_the_images", DETERMINISTIC)]
    return [
        pytest.param(
            name, variant, id=f"{name}-{variant}", marks=[] if (name, variant) in quick else [pytest.mark.slow]
        )
        for name, training in TRAININGS.items()
        for variant in (UNTUNED, DETERMINISTIC)
        if training.deterministic or variant != DETERMINISTIC
    ]


@pytest.mark.medium
@pytest.mark.parametrize(("training", "case"), _each())
def test_it_is_the_run_that_it_is_without_us(training: Training, case: str) -> None:
    found = differs(training, case)
    assert not found, "\n".join(found)


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAININGS)
def test_a_plain_run_is_the_same_twice(name: str) -> None:
    training = TRAININGS[name]
    first, second = plain(training, ((PLAIN, training.epochs),)), run(training, ((PLAIN, training.epochs),))
    assert not differences(training, second, first, [first])
    assert second.seen.losses == first.seen.losses


@pytest.mark.parametrize(("name", "variant"), _steady())
def test_it_has_the_same_bits_whatever_the_clock_says(name: str, variant: str) -> None:
    """Where no live trials take place: of two runs with one seed, one finds all parts faster and one finds none so."""
    training = TRAININGS[name]
    legs = ((variant, training.epochs),)
    first, second = (run(training, legs, parts_are_faster=are_faster) for are_faster in (True, False))
    assert not differences(training, second, first, [first])
    assert second.seen.losses == first.seen.losses


@pytest.mark.parametrize(("name", "variant"), _steady())
def test_it_has_the_same_bits_a_second_time(name: str, variant: str, tmp_path: Path) -> None:
    """The second of two runs with one seed remembers what the first has tried."""
    training = TRAININGS[name]
    legs = ((variant, training.epochs),)
    first, second = (run(training, legs, cache=str(tmp_path / "cache")) for _ in range(2))
    assert not differences(training, second, first, [first])
    assert second.seen.losses == first.seen.losses


@pytest.mark.parametrize("name", ["gnn_with_index_add", "neighbours_by_numpy_at_the_end_of_the_epoch"])
def test_what_raises_in_bfloat16_costs_the_precision_alone(name: str) -> None:
    training = TRAININGS[name]
    report = run(training, ((DEFAULTS, training.epochs),)).report
    assert "precision: 32-true" in report
    assert "taken back" not in report


def test_there_are_trainings_enough() -> None:
    assert len(TRAININGS) >= 60


def test_live_trials_switch_arms_in_those_that_are_long() -> None:
    training = TRAININGS["dropout_on_the_images"]
    assert run(training, CASES["32-true, switching"].legs(training)).questions


def test_weights_nudged_by_their_last_bit_make_another_run_that_is_as_good() -> None:
    training = TRAININGS["gpt_with_a_tied_head"]
    legs = ((PLAIN, 1),)
    expected, nudged = plain(training, legs), run(training, ((NUDGED[0], 1),))
    assert nudged.seen.losses != expected.seen.losses
    assert not differences(training, nudged, expected, [nudged])


def test_a_number_drawn_more_is_noticed() -> None:
    training = TRAININGS["mixup"]
    legs = ((PLAIN, training.epochs),)
    expected, other = plain(training, legs), run(training, legs)
    for drawn in (other.seen.streams[3], other.streams):
        drawn["numpy"] = "another"
    assert differences(training, other, expected, [expected]) == [
        "the numpy stream, from step 3",
        "streams at the end: ['numpy']",
    ]


def test_a_flag_among_the_weights_is_compared() -> None:
    training = TRAININGS["mixup"]
    legs = ((PLAIN, training.epochs),)
    expected, other = run(training, legs), run(training, legs)
    expected.state["started"], other.state["started"] = torch.tensor(True), torch.tensor(False)
    assert differences(training, other, expected, [expected]) == ["weight started: off by 1 (allowed 6.1e-05)"]


def test_a_training_goes_on_from_its_own_checkpoint() -> None:
    training = TRAININGS["gpt_with_a_tied_head"]
    steps = len(plain(training, ((PLAIN, 2),)).seen.batches)
    assert len(run(training, ((PLAIN, 1), (TRUE, 1))).seen.batches) == steps / 2
