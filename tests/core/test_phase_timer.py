"""A step's time in parts that add up to all of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from typing_extensions import override

from lightning_accel.core.clocks import StepClock
from lightning_accel.core.phase_timer import PartTimer


class HandClock(StepClock):
    """Shows what a test sets; ``passed`` is how far the device has come."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.passed = float("inf")
        self._mark = lambda: self.now
        self._unit_ms = 1.0

    @override
    def has_passed(self, mark: float) -> bool:
        return mark <= self.passed


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def timer(clock: HandClock) -> Iterator[PartTimer]:
    timer = PartTimer(clock, "rest")
    yield timer
    timer.read()
    assert not timer.is_on


def passes(clock: HandClock, ms: float) -> None:
    clock.now += ms


def a_step(timer: PartTimer, clock: HandClock) -> None:
    timer.begin()
    passes(clock, 1)
    timer.enter("optimizer")
    passes(clock, 2)
    timer.enter("forward")
    passes(clock, 30)
    timer.leave()
    passes(clock, 4)
    timer.leave()
    passes(clock, 5)
    timer.end()


def test_time_is_that_of_the_innermost_part_and_all_of_it_is_somebodys(timer: PartTimer, clock: HandClock) -> None:
    a_step(timer, clock)
    timer.read()
    assert timer.ms == {"rest": 6, "optimizer": 6, "forward": 30}
    assert sum(timer.ms.values()) == clock.now


def test_steps_are_added_up(timer: PartTimer, clock: HandClock) -> None:
    a_step(timer, clock)
    a_step(timer, clock)
    timer.read()
    assert (timer.steps, timer.ms["forward"]) == (2, 60)


def test_between_steps_parts_count_nothing(timer: PartTimer, clock: HandClock) -> None:
    timer.enter("data")
    passes(clock, 7)
    timer.leave()
    timer.end()
    timer.read()
    assert (timer.steps, dict(timer.ms)) == (0, {})


def test_a_step_that_is_dropped_counts_nothing(timer: PartTimer, clock: HandClock) -> None:
    timer.begin()
    timer.enter("forward")
    timer.drop()
    timer.leave()
    timer.end()
    a_step(timer, clock)
    timer.read()
    assert timer.steps == 1


def test_what_the_device_has_not_passed_is_read_later(timer: PartTimer, clock: HandClock) -> None:
    clock.passed = 0.0
    a_step(timer, clock)
    timer.read()
    assert timer.steps == 0
    clock.passed = clock.now
    timer.read()
    assert timer.steps == 1
