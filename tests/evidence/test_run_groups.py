"""Several runs beside several others: what the interval over runs promises, and what is told of them together."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from scipy.stats import mannwhitneyu

from evidence.test_compare import EPOCH, record
from lightning_accel.evidence.compare import NotComparableError
from lightning_accel.evidence.record import Record
from lightning_accel.evidence.run_groups import FEWEST_RUNS, RunGroups, bench, interval_rank, orders_by_wins, shift_of

LOSSES = [(4, 2.0), (8, 1.0)]


def runs(*ms: float, **options: Any) -> list[Record]:
    """Each with steps that all take as long."""
    return [record([each] * 10, **options) for each in ms]


def in_turns(a: list[float], b: list[float]) -> RunGroups:
    return bench(runs(*a), runs(*b))


def test_orders_are_counted_as_by_hand() -> None:
    for count_a, count_b in ((1, 1), (2, 3), (4, 4), (5, 2)):
        counted: Counter[int] = Counter()
        for places in itertools.combinations(range(count_a + count_b), count_a):
            others = set(range(count_a + count_b)) - set(places)
            counted[sum(place > other for place in places for other in others)] += 1
        assert orders_by_wins(count_a, count_b) == [counted[wins] for wins in range(count_a * count_b + 1)]


@pytest.mark.parametrize(
    ("count", "rank", "confidence"),
    [(3, 0, 0.0), (4, 1, 1 - 2 / 70), (5, 3, 1 - 8 / 252), (6, 6, 1 - 38 / 924)],
)
def test_what_is_promised_is_what_so_many_runs_can_tell(count: int, rank: int, confidence: float) -> None:
    assert interval_rank(count, count) == (rank, pytest.approx(confidence))


def test_four_runs_are_the_fewest() -> None:
    assert interval_rank(FEWEST_RUNS, FEWEST_RUNS)[0]
    assert not interval_rank(FEWEST_RUNS - 1, FEWEST_RUNS - 1)[0]


def test_the_interval_holds_what_the_rank_sum_test_does_not_reject() -> None:
    """SciPy's test, by its exact distribution, of A moved to either side of a bound."""
    draw = random.Random(0)
    a, b = [draw.gauss(0, 1) for _ in range(5)], [draw.gauss(1, 1) for _ in range(5)]
    _, low, high = shift_of(a, b)
    for bound, inward in ((low, 1e-9), (high, -1e-9)):
        inside, outside = (
            mannwhitneyu([x + bound + step for x in a], b, method="exact").pvalue for step in (inward, -inward)
        )
        assert outside < 0.05 <= inside


@pytest.mark.parametrize("drift", ["none", "steady", "wandering"])
def test_of_equal_programs_the_interval_holds_one_in_nineteen_of_twenty_whatever_drifts(drift: str) -> None:
    draw, held = random.Random(1), 0
    for _ in range(1000):
        level, a, b = 0.0, [], []
        for pair in range(5):
            for side in (a, b) if pair % 2 == 0 else (b, a):
                level += {"none": 0.0, "steady": 0.02, "wandering": draw.gauss(0, 0.02)}[drift]
                side.append(level + draw.gauss(0, 0.02))
        _, low, high = shift_of(a, b)
        held += low <= 0 <= high
    assert held >= 950


def test_the_ratio_is_that_of_the_runs_and_no_matter_how_many_steps_they_have() -> None:
    found = in_turns([10.0, 10.2, 9.9, 10.1, 10.0], [5.0, 5.1, 4.9, 5.0, 5.2])
    assert found.speed.ratio == pytest.approx(2, rel=0.02)
    assert 1.9 < found.speed.low < 2 < found.speed.high < 2.1
    assert (found.runs, found.unit, found.per_second) == (5, "samples", pytest.approx((800, 1600)))


def test_one_run_of_five_that_is_far_off_does_not_spoil_the_ratio() -> None:
    found = in_turns([10.0, 10.2, 9.9, 10.1, 10.0], [10.0, 10.1, 9.9, 10.0, 30.0])
    assert found.speed.ratio == pytest.approx(1, rel=0.02)


def test_of_few_runs_there_is_a_ratio_and_no_interval() -> None:
    found = in_turns([10.0] * 3, [5.0] * 3)
    assert (found.speed.ratio, found.speed.low, found.speed.high) == (pytest.approx(2), 0, math.inf)
    assert (found.confidence, found.loss_change) == (0, "")
    assert "too few runs for an interval of 95%, which takes 4 of each" in found.remarks


def test_slower_is_what_is_slower_with_the_whole_interval() -> None:
    steady = [10.0, 10.01, 10.02, 9.99, 10.03]
    assert in_turns(steady, [ms * 1.1 for ms in steady]).is_slower(0.03)
    assert not in_turns(steady, [10.0, 10.1, 11.0, 12.0, 12.1]).is_slower(0.03)


def test_larger_is_what_is_larger_with_the_whole_interval() -> None:
    def with_peaks(*mib: float) -> list[Record]:
        return [record([10.0] * 9, epoch=EPOCH | {"peak_memory_mib": each}) for each in mib]

    plain = with_peaks(100, 101, 100, 102, 101)
    found = bench(plain, with_peaks(120, 121, 119, 120, 122))
    assert found.is_larger(0.03)
    assert found.memory_mib == (101, 120)
    assert not bench(plain, with_peaks(100, 101, 110, 120, 101)).is_larger(0.03)


def test_memory_that_one_run_does_not_tell_is_not_compared() -> None:
    other = [*runs(1.0, 1.0, 1.0), record([1.0] * 9, epoch=EPOCH | {"peak_memory_source": "the process"})]
    found = bench(runs(*[1.0] * 4), other)
    assert (found.memory, found.memory_mib, found.is_larger(0.0)) == (None, None, False)
    assert any("not measured alike" in remark for remark in found.remarks)


def test_losses_at_equal_steps_have_an_interval_too() -> None:
    def with_losses(*losses: float) -> list[Record]:
        return [record([1.0] * 9, losses=[(8, loss), (9, loss)]) for loss in losses]

    found = bench(with_losses(1.0, 1.1, 0.9, 1.0, 1.1), with_losses(2.0, 2.1, 1.9, 2.0, 2.1))
    assert (found.losses, found.loss_step) == ((1.0, 2.0), 9)
    assert found.loss_shift is not None
    middle, low, high = found.loss_shift
    assert middle == pytest.approx(1)
    assert 0.8 < low < 1 < high < 1.2


def test_equal_losses_of_seeded_runs_are_equal() -> None:
    found = bench(runs(*[1.0] * 5, losses=LOSSES), runs(*[1.0] * 5, losses=LOSSES))
    assert found.loss_shift == (0, 0, 0)


def test_a_loss_that_is_no_number_is_not_compared() -> None:
    found = bench(runs(*[1.0] * 5, losses=LOSSES), runs(*[1.0] * 5, losses=[(8, math.inf)]))
    assert (found.losses, found.loss_shift) == (None, None)


def test_what_a_steps_time_goes_to_is_the_mean_of_the_runs() -> None:
    def with_parts(ms: float) -> Record:
        found = record([ms] * 9)
        return replace(found, steps=[replace(found.steps[0], looked_at=2, parts_ms={"forward": 2 * ms})])

    found = bench([with_parts(1.0), with_parts(3.0)], [with_parts(4.0), with_parts(4.0)])
    assert found.parts_ms == {"forward": (2, 4)}


def test_runs_of_different_models_are_not_compared() -> None:
    with pytest.raises(NotComparableError, match="The model is not the same"):
        bench(runs(*[1.0] * 4), runs(*[1.0] * 4, model="mine.Other"))


def test_runs_that_begin_where_others_ended_are_not_compared() -> None:
    (later,) = runs(1.0)
    later = replace(later, steps=[replace(later.steps[0], first=11, last=20)])
    with pytest.raises(NotComparableError, match="begin at different steps, 1 and 11"):
        bench(runs(1.0, 1.0), [*runs(1.0), later])


def test_a_run_that_did_not_finish_is_named() -> None:
    found = bench(runs(1.0, 1.0), [*runs(1.0), replace(runs(1.0)[0], status="interrupted")])
    assert "run 2 of B interrupted" in found.remarks
