"""Whether a step may run out of memory, and what an answer to that costs."""

from __future__ import annotations

import pytest
import torch

from lightning_accel.core.clocks import HostClock
from lightning_accel.core.step_timeline import StepTimeline
from lightning_accel.memory.pressure import Pressure, Toll

CPU = torch.device("cpu")


@pytest.fixture
def pressure(monkeypatch: pytest.MonkeyPatch) -> Pressure:
    """On a machine with room, without a limit of this process's own."""
    monkeypatch.setattr("lightning_accel.memory.pressure.own_limits", lambda: [])
    monkeypatch.setattr("lightning_accel.memory.pressure.limit_bytes", lambda device: 1 << 50)
    return Pressure(CPU)


def test_first_steps_and_larger_batches_may_run_out_and_others_not(pressure: Pressure) -> None:
    sizes = [4, 4, 4, 4, 2, 8, 8]
    assert [pressure.may_run_out(torch.ones(size)) for size in sizes] == [True, True, True, False, False, True, False]


def test_near_the_end_of_the_memory_every_step_may(pressure: Pressure, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_accel.memory.pressure.limit_bytes", lambda device: 1 << 20)
    assert all(pressure.may_run_out(torch.ones(4)) for _ in range(6))


def test_where_the_system_does_not_tell_how_much_memory_there_is_the_run_goes_on(
    pressure: Pressure, monkeypatch: pytest.MonkeyPatch
) -> None:
    def untold(device: torch.device) -> int:
        raise FileNotFoundError("/proc/meminfo")

    monkeypatch.setattr("lightning_accel.memory.pressure.limit_bytes", untold)
    assert [pressure.may_run_out(torch.ones(4)) for _ in range(5)] == [True, True, True, False, False]


def test_a_process_with_a_limit_is_always_near_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_accel.memory.pressure.own_limits", lambda: [1])
    pressure = Pressure(CPU)
    assert all(pressure.may_run_out(torch.ones(4)) for _ in range(6))


def test_the_toll_is_known_after_some_steps_and_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock of the test's own: a step takes one second before, two after."""
    now = [0.0]
    monkeypatch.setattr("lightning_accel.core.clocks.perf_counter_ns", lambda: round(1e9 * now[0]))
    toll = Toll(CPU, StepTimeline(HostClock()))

    def step(seconds: float) -> bool:
        is_known = toll.step_begins()
        now[0] += seconds
        return is_known

    assert not any(step(1.0) for _ in range(10))
    toll.ask(3 << 30)
    assert [step(2.0) for _ in range(19)] == [False] * 18 + [True]
    known = toll.known()
    assert known is not None
    before, after, ratio = known
    assert (before, ratio) == (3 << 30, 2.0)
    assert after is None or after > 0
    assert toll.known() is None
    assert not any(step(2.0) for _ in range(40))


def test_of_a_run_that_ends_at_once_no_toll_is_known() -> None:
    toll = Toll(CPU, StepTimeline(HostClock()))
    toll.ask(1 << 30)
    toll.step_begins()
    assert toll.known() == (1 << 30, None, None)
