"""How long a device waits for its host. The device is simulated: its timeline is exact, and so is what it has to do."""

from __future__ import annotations

import pytest

from lightning_accel.core.clocks import EventClock
from lightning_accel.core.phase_sums import PhaseSums
from lightning_accel.core.step_timeline import StepTimeline
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
        self.timeline = StepTimeline(EventClock(self.device.new_event))
        self.seen, self.held = PhaseSums(), PhaseSums()

    def trains(self, *, steps: int) -> Run:
        """The first few are not looked at: the host takes them to get ahead, where it does."""
        for step in range(steps + 3):
            self.step(None if step < 3 else self.seen)
        self.step(self.held)
        self.device.host_ms = max(self.device.host_ms, self.device.free_at_ms)
        self.timeline.settle()
        return self

    def step(self, sums: PhaseSums | None) -> None:
        self.timeline.step_began()
        if sums is not None:
            self.timeline.begin_phases(sums, "rest")
        if sums is self.held:
            self.device.launch(20 * self.host_ms)
        for part in PARTS:
            self.timeline.enter(part)
            for kernel in range(5):
                self.device.host_ms += self.host_ms
                self.device.launch(self.kernel_ms)
                if self.asks and kernel == 2:
                    self.device.host_ms = max(self.device.host_ms, self.device.free_at_ms)
            self.timeline.leave()
        self.timeline.step_ended()

    def idle(self) -> dict[str, float]:
        return self.seen.idle_ms(self.held, PARTS)


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
    run.timeline.settle()
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
        run.timeline.step_began()
        run.timeline.begin_phases(run.seen, "rest")
        run.device.host_ms += 5
        run.timeline.step_ended()
    run.timeline.settle()
    assert run.idle() == pytest.approx({"forward": 30, "backward": 30})


def test_nothing_waits_for_the_device() -> None:
    run = Run(host_ms=10, kernel_ms=4)
    for sums in (run.seen, run.held, None):
        run.step(sums)
    assert run.device.synchronisations == 0
    assert run.seen.steps == 1
