"""The rule by which figures become a verdict, and the intervals that it goes by."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_accel.claims.claim import Figure, Target, counted, verdict_of
from lightning_accel.claims.measure import Others, interleaved_ms, median_interval, speedup, timed_ms
from lightning_accel.core.host import usable_cores


def figure(condition: str, low: float, high: float, target: Target | None) -> Figure:
    return Figure(condition=condition, value=(low + high) / 2, low=low, high=high, target=target)


@pytest.mark.parametrize(
    ("kind", "low", "high", "is_met"),
    [
        ("at least", 1.9, 2.1, True),  # the interval reaches it
        ("at least", 1.7, 1.9, False),
        ("at least", 3.0, 3.0, True),
        ("at least", 1.0, 2.4, False),  # which a noisy machine may reach by chance: the median is 1.7
        ("at most", 1.9, 2.1, True),
        ("at most", 1.6, 3.0, False),
        ("at most", 2.1, 2.3, False),
        ("about", 1.85, 1.9, True),  # within a tenth
        ("about", 1.5, 1.8, False),
        ("about", 2.3, 2.5, False),
        ("more than", 1.9, 2.1, False),  # as likely as not it is no gain
        ("more than", 2.1, 2.2, True),
        ("more than", 2.0, 2.2, False),
    ],
)
def test_a_figure_meets_a_claim_of_two(kind: Any, low: float, high: float, is_met: bool) -> None:
    assert figure("", low, high, Target(kind, 2.0)).is_met is is_met


FASTER = Target("more than", 1)
MET, MISSED = figure("large", 2, 3, FASTER), figure("small", 0.5, 0.6, FASTER)
TO_COMPARE = figure("beside it", 7, 8, None)


@pytest.mark.parametrize(
    ("figures", "verdict"),
    [
        ([MET], ("holds", "holds")),
        ([MET, TO_COMPARE], ("holds", "holds")),
        ([MISSED, TO_COMPARE], ("no longer holds", "no longer holds")),
        ([MET, MISSED], ("holds when", "holds when large")),
        ([MET, MISSED, figure("huge", 5, 6, FASTER)], ("holds when", "holds when not: small")),
        ([TO_COMPARE], (None, "not measured here")),
        ([], (None, "not measured here")),
    ],
)
def test_verdicts_follow_from_the_figures(figures: list[Figure], verdict: tuple[str | None, str]) -> None:
    assert verdict_of(figures) == verdict


def test_what_is_counted_is_met_at_the_number_itself() -> None:
    assert counted("bytes", 0.5, "%", Target("at least", 0.5)).is_met
    assert not counted("bytes", 0.4999, "%", Target("at least", 0.5)).is_met


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=30))
def test_an_interval_holds_its_median_and_lies_within_the_values(values: list[float]) -> None:
    median, low, high = median_interval(values)
    assert min(values) <= low <= median <= high <= max(values)


def test_an_interval_covers_the_true_median_about_as_often_as_it_says() -> None:
    """Of 200 samples of 15 from a distribution with the median 0, some 95% of the intervals hold it."""
    draw = random.Random(0)
    intervals = [median_interval([draw.gauss(0, 1) for _ in range(15)])[1:] for _ in range(200)]
    covered = sum(low <= 0 <= high for low, high in intervals)
    assert 0.88 <= covered / 200 <= 0.995


def test_a_speedup_is_the_median_of_paired_rounds() -> None:
    found = speedup("here", [10.0, 40.0, 30.0], [5.0, 10.0, 10.0], FASTER)
    assert found.value == 3.0
    assert found.note == "30 ms to 10 ms"


@pytest.mark.parametrize("measure", [interleaved_ms, timed_ms])
def test_sides_take_turns_and_each_goes_first_in_some_rounds(measure: Any) -> None:
    calls: list[str] = []
    sides = {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}
    settings = {"rounds": 20, "warm_up": 0} if measure is interleaved_ms else {"seconds": 0}
    spent = measure(sides, **settings)
    assert len(spent["a"]) == len(spent["b"]) > 0
    turns = [name for index, name in enumerate(calls) if index == 0 or calls[index - 1] != name]
    if measure is interleaved_ms:
        rounds = [tuple(calls[start : start + 2]) for start in range(0, 40, 2)]
        assert set(rounds) == {("a", "b"), ("b", "a")}
    assert len(turns) > 4


def test_what_other_processes_compute_is_noticed() -> None:
    if usable_cores() != os.cpu_count():
        pytest.skip("this process may use some of the cores only, and cannot tell")
    others = Others()
    # Not waited for: what it computed would else count as this process's own.
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        time.sleep(0.3)
        found = others.cores()
        busy.kill()
    assert found > 0.1
