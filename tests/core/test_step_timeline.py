"""What counts as step, wait, gap and phase. The device is simulated: its timeline is exact, and it counts syncs."""

from __future__ import annotations

import pytest
import torch

from lightning_accel.core import clocks as _clocks
from lightning_accel.core.clocks import EventClock, HostClock, clock_for
from lightning_accel.core.phase_sums import PhaseSums
from lightning_accel.core.step_timeline import StepTally, StepTimeline, StepTimes
from support.gpu_sizes import on_gpu
from support.simulated_device import SimulatedDevice


class Timeline(StepTimeline):
    """Keeps what its steps took, in ``timed``."""

    def __init__(self, clock: HostClock | None = None) -> None:
        self.timed = StepTally()
        super().__init__(clock or HostClock(), self.timed.took)


def train(timeline: Timeline, device: SimulatedDevice, *, steps: int, fetch_ms: float, work_ms: float) -> None:
    for _ in range(steps):
        timeline.fetch_began()
        device.host_ms += fetch_ms
        timeline.fetch_ended()
        timeline.step_began()
        device.launch(work_ms)
        timeline.backward_began()
        timeline.step_ended(samples=4)


@pytest.fixture
def device() -> SimulatedDevice:
    return SimulatedDevice()


@pytest.fixture
def timeline(device: SimulatedDevice) -> Timeline:
    return Timeline(EventClock(device.new_event))


def test_a_fetch_while_the_device_is_busy_costs_no_wait(timeline: Timeline, device: SimulatedDevice) -> None:
    train(timeline, device, steps=10, fetch_ms=2, work_ms=10)
    timeline.settle()
    assert sum(timeline.timed.wait_ms) == 2  # the very first; the others hide behind the device's work
    assert list(timeline.timed.step_ms) == [10] * 10
    assert timeline.timed.samples == 40


def test_the_wait_is_what_the_device_waited(timeline: Timeline, device: SimulatedDevice) -> None:
    train(timeline, device, steps=10, fetch_ms=20, work_ms=5)
    timeline.settle()
    assert sum(timeline.timed.wait_ms) == 20 + 9 * 15
    assert list(timeline.timed.step_ms) == [5] * 10
    assert sum(timeline.timed.cycle_ms) == 10 * 20 + 5


def test_the_device_is_synchronised_once_and_at_the_end(timeline: Timeline, device: SimulatedDevice) -> None:
    train(timeline, device, steps=50, fetch_ms=1, work_ms=3)
    assert device.synchronisations == 0
    timeline.settle()
    assert device.synchronisations == 1


def test_a_long_epoch_reuses_its_events(timeline: Timeline, device: SimulatedDevice) -> None:
    train(timeline, device, steps=10_000, fetch_ms=5, work_ms=5)
    assert device.events < 20


def test_events_are_reused_in_the_next_epoch(timeline: Timeline, device: SimulatedDevice) -> None:
    for _ in range(5):
        timeline.restart()
        train(timeline, device, steps=20, fetch_ms=0, work_ms=5)
        timeline.settle()
    assert device.events < 90
    assert len(timeline.timed.step_ms) == 5 * 20


def test_a_paused_gap_is_not_training_time(timeline: Timeline, device: SimulatedDevice) -> None:
    train(timeline, device, steps=2, fetch_ms=0, work_ms=5)
    timeline.pause()
    device.launch(1000)  # validation
    train(timeline, device, steps=2, fetch_ms=0, work_ms=5)
    timeline.settle()
    assert sum(timeline.timed.cycle_ms) == 20


def test_an_ordinary_gap_is_training_time_and_no_step_or_wait(timeline: Timeline, device: SimulatedDevice) -> None:
    train(timeline, device, steps=1, fetch_ms=0, work_ms=5)
    device.host_ms += 12  # a logger's write: the device is idle for 7 of them
    train(timeline, device, steps=1, fetch_ms=0, work_ms=5)
    timeline.settle()
    assert sum(timeline.timed.cycle_ms) == 17
    assert sum(timeline.timed.wait_ms) == 0
    assert list(timeline.timed.step_ms) == [5, 5]


def test_a_fetch_inside_the_step_is_wait(timeline: Timeline, device: SimulatedDevice) -> None:
    timeline.step_began()
    timeline.fetch_began()
    device.host_ms += 30
    timeline.fetch_ended()
    device.launch(5)
    timeline.step_ended(samples=1)
    timeline.settle()
    assert (sum(timeline.timed.wait_ms), list(timeline.timed.step_ms)) == (30, [5])


def test_a_step_set_apart_is_counted_and_its_time_is_not(timeline: Timeline, device: SimulatedDevice) -> None:
    train(timeline, device, steps=2, fetch_ms=0, work_ms=5)
    timeline.step_began()
    device.launch(500)
    timeline.step_ended(samples=4, is_apart=True)
    timeline.settle()
    assert list(timeline.timed.step_ms) == [5, 5]
    assert (timeline.timed.steps_apart, timeline.timed.samples_apart) == (1, 4)


def test_steps_that_end_together_are_equal_parts_of_their_time(timeline: Timeline, device: SimulatedDevice) -> None:
    train(timeline, device, steps=9, fetch_ms=30, work_ms=10)  # but for the first, the device works for 10 of 30 ms
    device.launch(120)
    assert timeline.steps_ended(4, samples=16) == 4
    timeline.settle()
    assert list(timeline.timed.cycle_ms)[1:] == [30] * 12
    assert list(timeline.timed.wait_ms)[1:] == [20] * 12
    assert len(timeline.timed.step_ms) == 9
    assert timeline.timed.samples == 9 * 4 + 16


def test_of_steps_in_which_there_was_a_pause_none_is_timed(timeline: Timeline, device: SimulatedDevice) -> None:
    train(timeline, device, steps=8, fetch_ms=0, work_ms=10)
    device.launch(10)
    timeline.pause()
    device.launch(500)
    assert timeline.steps_ended(4, samples=16) == 0
    timeline.settle()
    assert list(timeline.timed.cycle_ms) == [10] * 8


def test_an_abandoned_step_leaves_no_trace(timeline: Timeline, device: SimulatedDevice) -> None:
    train(timeline, device, steps=1, fetch_ms=0, work_ms=5)
    timeline.fetch_began()
    timeline.fetch_ended()
    timeline.restart()
    train(timeline, device, steps=1, fetch_ms=0, work_ms=7)
    timeline.settle()
    assert list(timeline.timed.step_ms) == [5, 7]


@pytest.fixture
def host_ms(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The host clock's time, in a list to be written to."""
    now = [0.0]
    monkeypatch.setattr(_clocks, "perf_counter_ns", lambda: int(now[0] * 1e6))
    return now


def run_on_host(timeline: Timeline, host_ms: list[float], *parts: tuple[str, float]) -> None:
    for part, took_ms in parts:
        if part == "fetch":
            timeline.fetch_began()
            host_ms[0] += took_ms
            timeline.fetch_ended()
        elif part == "step":
            timeline.step_began()
            host_ms[0] += took_ms
            timeline.step_ended(samples=2)
        elif part == "backward":
            timeline.backward_began()
            host_ms[0] += took_ms
        elif part == "pause":
            timeline.pause()
            host_ms[0] += took_ms
        else:
            host_ms[0] += took_ms


def test_the_host_clock_tells_wait_step_and_gap_apart(host_ms: list[float]) -> None:
    timeline = Timeline()
    run_on_host(timeline, host_ms, ("fetch", 3), ("step", 10), ("gap", 1), ("fetch", 4), ("step", 20), ("pause", 500))
    run_on_host(timeline, host_ms, ("fetch", 0), ("step", 30))
    assert list(timeline.timed.step_ms) == pytest.approx([10, 20, 30])
    assert sum(timeline.timed.wait_ms) == pytest.approx(7)
    assert sum(timeline.timed.cycle_ms) == pytest.approx(68)


def test_two_fetches_before_a_step_are_both_wait(host_ms: list[float]) -> None:
    timeline = Timeline()
    run_on_host(timeline, host_ms, ("fetch", 3), ("fetch", 4), ("step", 10))
    assert sum(timeline.timed.wait_ms) == pytest.approx(7)
    assert list(timeline.timed.step_ms) == pytest.approx([10])


def test_without_fetch_marks_the_wait_is_part_of_the_gap(host_ms: list[float]) -> None:
    timeline = Timeline()
    run_on_host(timeline, host_ms, ("step", 10), ("gap", 5), ("step", 10))
    assert sum(timeline.timed.cycle_ms) == pytest.approx(25)
    assert sum(timeline.timed.wait_ms) == 0


def test_what_comes_before_the_first_backward_pass_is_gap_wait_and_forward(host_ms: list[float]) -> None:
    timeline = Timeline()

    def step(*parts: tuple[str, float]) -> None:
        timeline.step_began()
        run_on_host(timeline, host_ms, *parts)
        timeline.step_ended(samples=2)

    run_on_host(timeline, host_ms, ("fetch", 3))
    step(("forward", 10), ("backward", 20), ("forward", 30), ("backward", 40))
    run_on_host(timeline, host_ms, ("gap", 1), ("fetch", 4))
    step(("forward", 50), ("backward", 60))
    run_on_host(timeline, host_ms, ("fetch", 4))
    step(("skipped", 70))
    assert list(timeline.timed.before_backward_ms) == pytest.approx([13, 55])


def test_a_backward_pass_outside_of_the_steps_is_none_of_theirs(host_ms: list[float]) -> None:
    timeline = Timeline()
    run_on_host(timeline, host_ms, ("backward", 5), ("fetch", 3), ("step", 10), ("backward", 5), ("fetch", 3))
    assert len(timeline.timed.before_backward_ms) == 0


def test_the_way_to_the_backward_pass_is_the_devices(timeline: Timeline, device: SimulatedDevice) -> None:
    for _ in range(3):
        timeline.fetch_began()
        device.host_ms += 20
        timeline.fetch_ended()
        timeline.step_began()
        device.launch(7)
        timeline.backward_began()
        device.launch(10)
        timeline.backward_began()
        timeline.step_ended(samples=4)
    timeline.settle()
    assert list(timeline.timed.before_backward_ms) == [20 + 7, 3 + 7, 3 + 7]  # the device is busy while data is fetched


def test_a_pause_within_a_cycle_does_nothing(host_ms: list[float]) -> None:
    """``trainer.save_checkpoint`` called from ``training_step``: part of the user's step."""
    timeline = Timeline()
    run_on_host(timeline, host_ms, ("fetch", 3), ("pause", 5), ("step", 10))
    assert sum(timeline.timed.cycle_ms) == pytest.approx(18)


@pytest.mark.parametrize("is_fetching", [False, True])
def test_what_is_left_out_before_a_step_is_neither_wait_nor_gap(host_ms: list[float], is_fetching: bool) -> None:
    timeline = Timeline()
    run_on_host(timeline, host_ms, ("fetch", 3), ("step", 10), ("gap", 1))
    if is_fetching:
        timeline.fetch_began()
    host_ms[0] += 100
    timeline.leave_out()
    if not is_fetching:
        timeline.fetch_began()
    host_ms[0] += 4
    timeline.fetch_ended()
    run_on_host(timeline, host_ms, ("step", 20))
    assert list(timeline.timed.wait_ms) == pytest.approx([3, 4])
    assert list(timeline.timed.cycle_ms) == pytest.approx([13, 24])


def test_listeners_are_told_of_each_step_once_the_device_has_passed_it(device: SimulatedDevice) -> None:
    told: list[StepTimes] = []
    timeline = StepTimeline(EventClock(device.new_event), told.append)
    for number in range(3):
        timeline.step_began()
        device.launch(5)
        timeline.labels["number"] = number
        timeline.step_ended()
    assert told == []
    device.host_ms = 7
    timeline.step_began()
    timeline.step_ended()
    assert [(step.labels, step.step_ms) for step in told] == [({"number": 0}, 5)]
    timeline.settle()
    assert [step.labels.get("number") for step in told] == [0, 1, 2, None]


def test_a_step_may_end_at_an_instant_that_is_over(host_ms: list[float]) -> None:
    timeline = Timeline()
    timeline.step_began()
    host_ms[0] += 5
    ended = timeline.clock.mark()
    host_ms[0] += 100
    timeline.step_ended(at=ended)
    assert list(timeline.timed.step_ms) == [5]


# -- phases --------------------------------------------------------------------------------------------------------


def in_phases(timeline: Timeline, host_ms: list[float]) -> PhaseSums:
    """A step of 42 ms: an optimizer's, which calls the forward pass."""
    sums = PhaseSums()
    timeline.step_began()
    timeline.begin_phases(sums, "rest")
    host_ms[0] += 1
    timeline.enter("optimizer")
    host_ms[0] += 2
    timeline.enter("forward")
    host_ms[0] += 30
    timeline.leave()
    host_ms[0] += 4
    timeline.leave()
    host_ms[0] += 5
    return sums


def test_time_is_that_of_the_innermost_phase_and_all_of_it_is_somebodys(host_ms: list[float]) -> None:
    timeline = Timeline()
    sums = in_phases(timeline, host_ms)
    timeline.step_ended()
    assert (sums.steps, sums.ms) == (1, pytest.approx({"rest": 6, "optimizer": 6, "forward": 30}))
    assert list(timeline.timed.step_ms) == pytest.approx([42])


def test_between_steps_phases_count_nothing(host_ms: list[float]) -> None:
    timeline = Timeline()
    sums = in_phases(timeline, host_ms)
    timeline.step_ended()
    timeline.enter("data")
    host_ms[0] += 7
    timeline.leave()
    run_on_host(timeline, host_ms, ("step", 3))
    assert (sums.steps, sum(sums.ms.values())) == (1, pytest.approx(42))


def test_phases_that_are_dropped_count_nothing_and_the_step_does(host_ms: list[float]) -> None:
    timeline = Timeline()
    sums = in_phases(timeline, host_ms)
    timeline.drop_phases()
    timeline.leave()
    timeline.step_ended()
    assert sums.steps == 0
    assert list(timeline.timed.step_ms) == pytest.approx([42])


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*[Ss]ynchronization debug mode is a prototype")
def test_cuda_events_time_the_device_without_synchronising() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    timeline = Timeline(clock_for(device))
    size = on_gpu(2048, simulated=64)
    x = torch.randn(size, size, device=device)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            timeline.fetch_began()
            timeline.fetch_ended()
            timeline.step_began()
            for _ in range(10):
                x @ x
            timeline.backward_began()
            for _ in range(10):
                x @ x
            timeline.step_ended(samples=1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    timeline.settle()
    assert len(timeline.timed.step_ms) == 20
    assert all(step_ms > 0 for step_ms in timeline.timed.step_ms)
    assert len(timeline.timed.before_backward_ms) == 20
    assert sum(timeline.timed.wait_ms) < sum(timeline.timed.cycle_ms)
