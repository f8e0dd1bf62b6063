"""How long a device waits for its host. The device is simulated: its timeline is exact, and so is what it has to do."""

from __future__ import annotations

import pytest

from lightning_accel.core.clocks import EventClock
from lightning_accel.core.idle import HeldTimer, idle_ms
from lightning_accel.core.phase_timer import PartTimer
from support.simulated_device import SimulatedDevice

PARTS = ("forward", "backward")


class Run:
    """Steps of two parts with five kernels each, as they are and with the device held back.

    Args:
        host_ms: What the host takes to launch a kernel.
        kernel_ms: What the device takes over it.
        asks: Whether the host asks for a result in the midst of each part, as ``.item()`` does.
    """

    def __init__(self, *, host_ms: float, kernel_ms: float, asks: bool = False) -> None:
        self.device = SimulatedDevice()
        self.host_ms, self.kernel_ms, self.asks = host_ms, kernel_ms, asks
        clock = EventClock(self.device.new_event)
        self.seen = PartTimer(clock, "rest")
        self.held = HeldTimer(clock, "rest", PARTS, self.device.launch)
        self.held.hold_ms = 20 * host_ms

    def trains(self, *, steps: int) -> Run:
        """The first few are not looked at: the host takes them to get ahead, where it does."""
        for step in range(steps + 3):
            self.step(None if step < 3 else self.seen)
        self.step(self.held)
        self.device.host_ms = max(self.device.host_ms, self.device.free_at_ms)
        self.seen.read()
        self.held.read()
        return self

    def step(self, timer: PartTimer | None) -> None:
        if timer is not None:
            timer.begin()
        for part in PARTS:
            if timer is not None:
                timer.enter(part)
            for kernel in range(5):
                self.device.host_ms += self.host_ms
                self.device.launch(self.kernel_ms)
                if self.asks and kernel == 2:
                    self.device.host_ms = max(self.device.host_ms, self.device.free_at_ms)
            if timer is not None:
                timer.leave()
        if timer is not None:
            timer.end()

    def idle(self) -> dict[str, float]:
        return idle_ms(self.seen, self.held, PARTS)


def test_a_device_that_is_done_before_the_host_asks_for_more_waits() -> None:
    run = Run(host_ms=10, kernel_ms=4).trains(steps=3)
    # Of each part 50 ms, five kernels of 4.
    assert run.idle() == pytest.approx({"forward": 3 * 30, "backward": 3 * 30})
    assert run.held.ms["forward"] == pytest.approx(5 * 4)


def test_a_device_that_is_busy_all_the_time_waits_for_nobody() -> None:
    run = Run(host_ms=1, kernel_ms=10).trains(steps=3)
    assert run.idle() == {"forward": 0, "backward": 0}
    assert run.seen.ms["forward"] == 3 * 50


def test_steps_that_vary_are_no_waiting_while_the_device_is_behind() -> None:
    """The held step happens to have shorter kernels; by the marks the device never came to where the host was."""
    run = Run(host_ms=1, kernel_ms=10)
    for _ in range(4):
        run.step(run.seen)
    run.kernel_ms = 6
    run.step(run.held)
    run.device.host_ms = run.device.free_at_ms
    run.seen.read()
    run.held.read()
    assert run.idle()["backward"] == 0


def test_a_host_that_waits_for_results_of_a_busy_device_is_no_waiting_of_the_device() -> None:
    """It waits no longer than the host then takes to launch the next kernel, in a step that is held back, too."""
    run = Run(host_ms=1, kernel_ms=10, asks=True).trains(steps=3)
    assert all(ms <= 3 * 1 for ms in run.idle().values())


def test_a_part_that_no_held_step_has_is_not_spoken_of() -> None:
    run = Run(host_ms=10, kernel_ms=4)
    run.step(run.seen)
    assert run.idle() == {}


def test_a_part_is_set_beside_the_same_part_in_as_many_steps() -> None:
    """As with accumulation, where most steps have no optimizer's."""
    run = Run(host_ms=10, kernel_ms=4).trains(steps=1)
    for _ in range(3):
        run.seen.begin()
        run.device.host_ms += 5
        run.seen.end()
    run.device.host_ms = max(run.device.host_ms, run.device.free_at_ms)
    run.seen.read()
    assert run.idle() == pytest.approx({"forward": 30, "backward": 30})


def test_the_device_is_held_once_in_a_step_and_outside_of_the_parts() -> None:
    held_ms: list[float] = []
    timer = HeldTimer(EventClock(SimulatedDevice().new_event), "rest", PARTS, held_ms.append)
    timer.hold_ms = 7.0
    timer.begin()
    timer.enter("data")
    timer.leave()
    assert held_ms == []
    timer.enter("forward")
    timer.enter("backward")
    assert held_ms == [7.0]
    timer.drop()
    timer.enter("forward")
    assert held_ms == [7.0]


def test_nothing_waits_for_the_device() -> None:
    run = Run(host_ms=10, kernel_ms=4).trains(steps=3)
    assert run.device.synchronisations == 0
