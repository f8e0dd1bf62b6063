"""Clocks: what counts as step, wait and gap. The device is simulated: its timeline is exact, and it counts syncs."""

from __future__ import annotations

import pytest
import torch

from lightning_accel.core import clocks as _clocks
from lightning_accel.core.clocks import EventClock, StepClock, clock_for
from support.gpu_sizes import on_gpu
from support.simulated_device import SimulatedDevice


def train(clock: EventClock, device: SimulatedDevice, *, steps: int, fetch_ms: float, work_ms: float) -> None:
    for _ in range(steps):
        clock.fetch_began()
        device.host_ms += fetch_ms
        clock.fetch_ended()
        clock.step_began()
        device.launch(work_ms)
        clock.backward_began()
        clock.step_ended(samples=4)


@pytest.fixture
def device() -> SimulatedDevice:
    return SimulatedDevice()


@pytest.fixture
def clock(device: SimulatedDevice) -> EventClock:
    return EventClock(device.new_event)


def test_a_fetch_while_the_device_is_busy_costs_no_wait(clock: EventClock, device: SimulatedDevice) -> None:
    train(clock, device, steps=10, fetch_ms=2, work_ms=10)
    clock.settle()
    assert clock.timed.wait_ms == 2  # the very first; the others hide behind the device's work
    assert list(clock.timed.step_ms) == [10] * 10
    assert clock.timed.samples == 40


def test_the_wait_is_what_the_device_waited(clock: EventClock, device: SimulatedDevice) -> None:
    train(clock, device, steps=10, fetch_ms=20, work_ms=5)
    clock.settle()
    assert clock.timed.wait_ms == 20 + 9 * 15
    assert list(clock.timed.step_ms) == [5] * 10
    assert clock.timed.train_ms == 10 * 20 + 5


def test_the_device_is_synchronised_once_and_at_the_end(clock: EventClock, device: SimulatedDevice) -> None:
    train(clock, device, steps=50, fetch_ms=1, work_ms=3)
    assert device.synchronisations == 0
    clock.settle()
    assert device.synchronisations == 1


def test_a_long_epoch_reuses_its_events(clock: EventClock, device: SimulatedDevice) -> None:
    train(clock, device, steps=10_000, fetch_ms=5, work_ms=5)
    assert device.events < 20


def test_events_are_reused_in_the_next_epoch(clock: EventClock, device: SimulatedDevice) -> None:
    for _ in range(5):
        clock.restart()
        train(clock, device, steps=20, fetch_ms=0, work_ms=5)
        clock.settle()
    assert device.events < 90
    assert len(clock.timed.step_ms) == 20


def test_a_paused_gap_is_not_training_time(clock: EventClock, device: SimulatedDevice) -> None:
    train(clock, device, steps=2, fetch_ms=0, work_ms=5)
    clock.pause()
    device.launch(1000)  # validation
    train(clock, device, steps=2, fetch_ms=0, work_ms=5)
    clock.settle()
    assert clock.timed.train_ms == 20


def test_an_ordinary_gap_is_training_time_and_neither_step_nor_wait(clock: EventClock, device: SimulatedDevice) -> None:
    train(clock, device, steps=1, fetch_ms=0, work_ms=5)
    device.host_ms += 12  # a logger's write: the device is idle for 7 of them
    train(clock, device, steps=1, fetch_ms=0, work_ms=5)
    clock.settle()
    assert clock.timed.train_ms == 17
    assert clock.timed.wait_ms == 0
    assert list(clock.timed.step_ms) == [5, 5]


def test_a_fetch_inside_the_step_is_wait(clock: EventClock, device: SimulatedDevice) -> None:
    clock.step_began()
    clock.fetch_began()
    device.host_ms += 30
    clock.fetch_ended()
    device.launch(5)
    clock.step_ended(samples=1)
    clock.settle()
    assert (clock.timed.wait_ms, list(clock.timed.step_ms)) == (30, [5])


def test_a_step_set_apart_is_in_its_own_tally(clock: EventClock, device: SimulatedDevice) -> None:
    train(clock, device, steps=2, fetch_ms=0, work_ms=5)
    clock.step_began()
    device.launch(500)
    clock.step_ended(samples=4, is_apart=True)
    clock.settle()
    assert list(clock.timed.step_ms) == [5, 5]
    assert list(clock.apart.step_ms) == [500]


def test_steps_that_end_together_are_equal_parts_of_their_time(clock: EventClock, device: SimulatedDevice) -> None:
    train(clock, device, steps=9, fetch_ms=30, work_ms=10)  # the device works for 10 of 30 ms, the first step left out
    device.launch(120)
    assert clock.steps_ended(4, samples=16) == 4
    clock.settle()
    assert list(clock.timed.cycle_ms)[1:] == [30] * 12
    assert list(clock.timed.each_wait_ms)[1:] == [20] * 12
    assert len(clock.timed.step_ms) == 9
    assert clock.timed.samples == 9 * 4 + 16


def test_of_steps_in_which_there_was_a_pause_none_is_timed(clock: EventClock, device: SimulatedDevice) -> None:
    train(clock, device, steps=8, fetch_ms=0, work_ms=10)
    device.launch(10)
    clock.pause()
    device.launch(500)
    assert clock.steps_ended(4, samples=16) == 0
    clock.settle()
    assert list(clock.timed.cycle_ms) == [10] * 8


def test_an_abandoned_step_leaves_no_trace(clock: EventClock, device: SimulatedDevice) -> None:
    train(clock, device, steps=1, fetch_ms=0, work_ms=5)
    clock.fetch_began()
    clock.fetch_ended()
    clock.restart()
    train(clock, device, steps=1, fetch_ms=0, work_ms=7)
    clock.settle()
    assert list(clock.timed.step_ms) == [7]


@pytest.fixture
def host_ms(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The host clock's time, in a list to be written to."""
    now = [0.0]
    monkeypatch.setattr(_clocks, "perf_counter_ns", lambda: int(now[0] * 1e6))
    return now


def run_on_host(clock: StepClock, host_ms: list[float], *parts: tuple[str, float]) -> None:
    for part, took_ms in parts:
        if part == "fetch":
            clock.fetch_began()
            host_ms[0] += took_ms
            clock.fetch_ended()
        elif part == "step":
            clock.step_began()
            host_ms[0] += took_ms
            clock.step_ended(samples=2)
        elif part == "backward":
            clock.backward_began()
            host_ms[0] += took_ms
        elif part == "pause":
            clock.pause()
            host_ms[0] += took_ms
        else:
            host_ms[0] += took_ms


def test_the_host_clock_tells_wait_step_and_gap_apart(host_ms: list[float]) -> None:
    clock = StepClock()
    run_on_host(clock, host_ms, ("fetch", 3), ("step", 10), ("gap", 1), ("fetch", 4), ("step", 20), ("pause", 500))
    run_on_host(clock, host_ms, ("fetch", 0), ("step", 30))
    assert list(clock.timed.step_ms) == pytest.approx([10, 20, 30])
    assert clock.timed.wait_ms == pytest.approx(7)
    assert clock.timed.train_ms == pytest.approx(68)


def test_two_fetches_before_a_step_are_both_wait(host_ms: list[float]) -> None:
    clock = StepClock()
    run_on_host(clock, host_ms, ("fetch", 3), ("fetch", 4), ("step", 10))
    assert clock.timed.wait_ms == pytest.approx(7)
    assert list(clock.timed.step_ms) == pytest.approx([10])


def test_without_fetch_marks_the_wait_is_part_of_the_gap(host_ms: list[float]) -> None:
    clock = StepClock()
    run_on_host(clock, host_ms, ("step", 10), ("gap", 5), ("step", 10))
    assert clock.timed.train_ms == pytest.approx(25)
    assert clock.timed.wait_ms == 0


def test_what_comes_before_the_first_backward_pass_is_gap_wait_and_forward(host_ms: list[float]) -> None:
    clock = StepClock()

    def step(*parts: tuple[str, float]) -> None:
        clock.step_began()
        run_on_host(clock, host_ms, *parts)
        clock.step_ended(samples=2)

    run_on_host(clock, host_ms, ("fetch", 3))
    step(("forward", 10), ("backward", 20), ("forward", 30), ("backward", 40))
    run_on_host(clock, host_ms, ("gap", 1), ("fetch", 4))
    step(("forward", 50), ("backward", 60))
    run_on_host(clock, host_ms, ("fetch", 4))
    step(("skipped", 70))
    assert list(clock.timed.before_backward_ms) == pytest.approx([13, 55])


def test_a_backward_pass_outside_of_the_steps_is_none_of_theirs(host_ms: list[float]) -> None:
    clock = StepClock()
    run_on_host(clock, host_ms, ("backward", 5), ("fetch", 3), ("step", 10), ("backward", 5), ("fetch", 3))
    assert len(clock.timed.before_backward_ms) == 0


def test_the_way_to_the_backward_pass_is_the_devices(clock: EventClock, device: SimulatedDevice) -> None:
    for _ in range(3):
        clock.fetch_began()
        device.host_ms += 20
        clock.fetch_ended()
        clock.step_began()
        device.launch(7)
        clock.backward_began()
        device.launch(10)
        clock.backward_began()
        clock.step_ended(samples=4)
    clock.settle()
    assert list(clock.timed.before_backward_ms) == [20 + 7, 3 + 7, 3 + 7]  # the device is busy while data is fetched


def test_a_pause_within_a_cycle_does_nothing(host_ms: list[float]) -> None:
    """``trainer.save_checkpoint`` called from ``training_step``: part of the user's step."""
    clock = StepClock()
    run_on_host(clock, host_ms, ("fetch", 3), ("pause", 5), ("step", 10))
    assert clock.timed.train_ms == pytest.approx(18)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*[Ss]ynchronization debug mode is a prototype")
def test_cuda_events_time_the_device_without_synchronising() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    clock = clock_for(device)
    size = on_gpu(2048, simulated=64)
    x = torch.randn(size, size, device=device)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            clock.fetch_began()
            clock.fetch_ended()
            clock.step_began()
            for _ in range(10):
                x @ x
            clock.backward_began()
            for _ in range(10):
                x @ x
            clock.step_ended(samples=1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    clock.settle()
    assert len(clock.timed.step_ms) == 20
    assert all(step_ms > 0 for step_ms in clock.timed.step_ms)
    assert len(clock.timed.before_backward_ms) == 20
    assert clock.timed.wait_ms < clock.timed.train_ms
