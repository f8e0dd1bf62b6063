"""Two runs beside each other: how fast, how sure, and what else was not the same."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from evidence.test_record import HEADER
from lightning_accel.evidence.compare import NotComparableError, compare_runs
from lightning_accel.evidence.events import StepMeasured, in_pieces
from lightning_accel.evidence.record import Record

_NUMBERS = itertools.count()
EPOCH = {"peak_memory_mib": 100.0, "peak_memory_source": "the allocator"}


def record(
    step_ms: list[float], *, batch: int | None = 8, epoch: Any = EPOCH, losses: Any = (), **header: Any
) -> Record:
    """Of a run that took so long for each of its steps."""
    count = len(step_ms)
    pieces = in_pieces(step_ms)
    some = StepMeasured(
        first=1,
        last=count,
        timed=count,
        cycle_ms=pieces,
        wait_ms=[0.0] * len(pieces),
        samples=None if batch is None else batch * count,
        losses=list(losses),
    )
    return Record(
        path=Path(f"run{next(_NUMBERS)}/accel/run.jsonl"),
        header=replace(HEADER, **header),
        steps=[some],
        epochs=[epoch],
        status="finished",
    )


def noisy(ms: float, seed: int, count: int = 30) -> list[float]:
    """Three in a hundred up or down, and every now and then twice as long."""
    draw = random.Random(seed)
    return [ms * math.exp(draw.gauss(0, 0.03)) * (2 if draw.random() < 0.05 else 1) for _ in range(count)]


def test_the_ratio_is_how_many_times_as_fast_the_second_one_is() -> None:
    found = compare_runs(record(noisy(11.0, 0, 300)), record(noisy(10.0, 1, 300)))
    assert found.speed.ratio == pytest.approx(1.1, rel=0.03)
    assert 1 < found.speed.low < found.speed.ratio < found.speed.high


def test_of_equal_runs_the_interval_holds_one_in_nineteen_of_twenty() -> None:
    held = 0
    for seed in range(400):
        speed = compare_runs(record(noisy(10.0, 2 * seed)), record(noisy(10.0, 2 * seed + 1))).speed
        held += speed.low <= 1 <= speed.high
    assert 0.92 <= held / 400 <= 0.98


def test_rare_slow_steps_are_waited_for_too() -> None:
    stalls = [100.0 if step % 5 == 0 else 10.0 for step in range(60)]
    assert compare_runs(record([10.0] * 60), record(stalls)).speed.ratio == pytest.approx(10 / 28, rel=0.05)


def test_the_same_steps_are_as_fast_in_a_short_run_and_in_a_long_one() -> None:
    short, long = ([100.0 if step % 5 == 0 else 10.0 for step in range(count)] for count in (60, 6000))
    assert compare_runs(record(short), record(long)).speed.ratio == pytest.approx(1, rel=0.05)


def test_runs_of_a_day_are_compared_in_a_moment() -> None:
    a, b = record([10.0] * 32), record([20.0] * 32)
    for one in (a, b):
        one.steps[:] = [replace(one.steps[0], first=1 + 32 * n, last=32 * (n + 1)) for n in range(1440)]
    assert compare_runs(a, b).speed.ratio == 0.5


def test_of_several_ranks_it_is_the_samples_of_all() -> None:
    a, b = (record([10.0] * 30, batch=8, world_size=2) for _ in range(2))
    assert compare_runs(a, b).per_second == pytest.approx((1600, 1600))


def test_a_script_is_the_same_training_as_a_module() -> None:
    a, b = record([1.0] * 30, model="__main__.Model"), record([1.0] * 30, model="train.Model")
    assert compare_runs(a, b).speed.ratio == 1


def test_shards_of_parameters_are_no_other_model() -> None:
    a = record([1.0] * 30, parameters=18, world_size=2, strategy="DDPStrategy")
    b = record([1.0] * 30, parameters=9, world_size=2, strategy="FSDPStrategy")
    assert compare_runs(a, b).differences["strategy"] == ("DDPStrategy", "FSDPStrategy")


def test_a_loss_that_is_no_number_any_more_is_said() -> None:
    found = compare_runs(record([1.0] * 30, losses=[(8, 1.0)]), record([1.0] * 30, losses=[(8, math.nan)]))
    assert (found.losses, "nan of B at step 8" in found.remarks[0]) == (None, True)


def test_the_beginning_is_left_out() -> None:
    compiled = [500.0] * 6 + [10.0] * 24
    assert compare_runs(record([10.0] * 30), record(compiled)).speed.ratio == 1


def test_steps_none_of_which_was_timed_are_passed_over() -> None:
    plain, other = record([10.0] * 30), record([10.0] * 30)
    other.steps.append(StepMeasured(first=31, last=31, timed=0, cycle_ms=[], wait_ms=[], samples=0, losses=[]))
    assert compare_runs(plain, other).speed.ratio == 1


def test_runs_with_other_batches_are_compared_by_the_sample() -> None:
    found = compare_runs(record([10.0] * 30, batch=8), record([20.0] * 30, batch=32))
    assert (found.unit, found.speed.ratio) == ("samples", 2)
    assert found.per_second == pytest.approx((800, 1600))


def test_where_samples_are_not_known_they_are_compared_by_the_step() -> None:
    found = compare_runs(record([10.0] * 30, batch=None), record([20.0] * 30))
    assert (found.unit, found.speed.ratio) == ("steps", 0.5)


def test_of_few_steps_there_is_a_ratio_and_no_interval() -> None:
    found = compare_runs(record([10.0] * 4), record([5.0] * 40))
    assert (found.speed.ratio, found.speed.low, found.speed.high) == (2, 0, math.inf)
    assert "too few steps for an interval" in found.remarks[0]


def test_the_peak_of_memory_is_the_largest_of_an_epoch() -> None:
    found = compare_runs(record([1.0] * 9), record([1.0] * 9, epoch=EPOCH | {"peak_memory_mib": 62.0}))
    assert found.memory_mib == (100, 62)


def test_peaks_that_were_not_measured_alike_are_not_compared() -> None:
    found = compare_runs(record([1.0] * 9), record([1.0] * 9, epoch=EPOCH | {"peak_memory_source": "the process"}))
    assert found.memory_mib is None
    assert any("not measured alike" in remark for remark in found.remarks)


def test_losses_are_compared_at_steps_that_both_have() -> None:
    a = record([1.0] * 9, losses=[(1, 9.0), (4, 3.0), (8, 2.0)])
    b = record([1.0] * 9, losses=[(4, 2.0), (8, 1.0), (9, 0.0)])
    found = compare_runs(a, b)
    assert (found.losses, found.loss_step) == ((2.5, 1.5), 8)


def test_what_else_differs_is_named() -> None:
    a = record([1.0] * 9, settings={"precision": "32-true", "compile": "off"}, versions={"torch": "2.12.0"})
    b = record([1.0] * 9, settings={"precision": "bf16-mixed", "compile": "off"}, versions={"torch": "2.13.0"}, cores=4)
    assert compare_runs(a, b).differences == {
        "cores": ("2", "4"),
        "torch": ("2.12.0", "2.13.0"),
        "precision": ("32-true", "bf16-mixed"),
    }


def test_a_plain_run_beside_one_with_the_plugin_is_said_in_a_word() -> None:
    assert compare_runs(record([1.0] * 9), record([1.0] * 9, settings={"compile": "off"})).differences == {
        "AccelPlugin": ("no", "yes")
    }


@pytest.mark.parametrize(
    ("other", "complaint"),
    [
        ({"model": "mine.Other"}, "The model is not the same: mine.Model in .*, mine.Other in"),
        ({"parameters": 19}, "The number of parameters is not the same: 18 in .*, 19 in"),
        ({"world_size": 2}, "The number of ranks is not the same"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_runs_of_different_trainings_are_not_compared(other: dict[str, Any], complaint: str) -> None:
    with pytest.raises(NotComparableError, match=complaint):
        compare_runs(record([1.0] * 9), record([1.0] * 9, **other))


def test_a_run_without_steps_is_not_compared() -> None:
    with pytest.raises(NotComparableError, match="has no steps: finished"):
        compare_runs(record([1.0] * 9), record([]))


def test_a_run_that_did_not_finish_is_compared_and_that_is_said() -> None:
    assert "killed" in compare_runs(record([1.0] * 9), replace(record([1.0] * 9), status="")).remarks[0]
