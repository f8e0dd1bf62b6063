"""Torch's profilers, of which there can be one at a time, and what a second one would do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.autograd import profiler, profiler_legacy
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from lightning_accel.core.profilers import closing_ranges, giving_way, is_profiling


def kineto() -> profile:
    return profile(activities=[ProfilerActivity.CPU])


@pytest.mark.filterwarnings("ignore:.*deprecated")
def test_a_profiler_at_work_is_seen_and_left_alone() -> None:
    for theirs in (kineto(), profiler.profile(), profiler_legacy.profile()):  # type: ignore[no-untyped-call]
        assert not is_profiling()
        with theirs:
            assert is_profiling()
            torch.ones(2).add(1)
        assert not is_profiling()
    assert any(event.name == "aten::add" for event in theirs.function_events)


def test_a_profiler_that_warms_up_is_seen() -> None:
    """One that begins after another was there in between would take the process with it."""
    theirs = profile(activities=[ProfilerActivity.CPU], schedule=schedule(wait=1, warmup=1, active=1))
    seen = []
    with theirs:
        for _ in range(3):
            seen.append(is_profiling())
            theirs.step()
    assert seen == [False, True, True]
    assert not is_profiling()


def test_a_range_that_is_open_when_a_profiler_stops_is_ended_with_it() -> None:
    """Ended under the next one, it would write to freed memory: this test would take the process with it."""
    for _ in range(20):
        ours = kineto()
        ours.start()
        with closing_ranges() as _:
            outer = record_function("open")
            outer.__enter__()
        ours.stop()
        with kineto() as theirs:
            torch.ones(2).add(1)
            outer.__exit__(None, None, None)
        assert [event.name for event in ours.events()] == ["open"]
        assert "open" not in {event.name for event in theirs.events()}


def test_ranges_are_tracked_only_in_between() -> None:
    before = record_function.__enter__
    with pytest.raises(ZeroDivisionError), closing_ranges():
        _ = 1 / 0
    assert record_function.__enter__ is before


@pytest.mark.parametrize(
    ("begin", "told"),
    [
        (kineto, "end"),
        (profiler.profile, "end"),
    ],
)
def test_who_gives_way_is_told_before_another_begins(begin: Any, told: str) -> None:
    heard: list[str] = []
    with giving_way(lambda: heard.append("end"), lambda: heard.append("lose")), begin():
        assert heard[0] == told


def test_who_gives_way_is_told_of_one_that_was_made_before() -> None:
    heard: list[str] = []
    theirs = profiler.profile()
    with giving_way(lambda: heard.append("end"), lambda: heard.append("lose")), theirs:
        assert heard == ["lose"]


def test_nobody_is_told_afterwards() -> None:
    heard: list[str] = []
    with giving_way(lambda: heard.append("end"), lambda: heard.append("lose")):
        pass
    with kineto():
        pass
    assert heard == []
