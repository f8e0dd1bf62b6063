"""Live trials on a simulated device that works behind the host's back: its own time counts, and nobody waits for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from lightning.pytorch import Trainer

from lightning_accel import Plan, accelerate
from lightning_accel.callbacks import _fit_timeline as fit_timeline
from lightning_accel.core.clocks import EventClock
from lightning_accel.core.purse import Purse
from lightning_accel.lightning.plain_steps import PlainSteps
from lightning_accel.tuning import turns
from support.live_runs import SimulatedTime, Speed, Timed, fit, simulated
from support.simulated_device import SimulatedDevice


class QueuedTime(SimulatedTime):
    """Steps launch their work and go on; once the queue is ``QUEUE_MS`` long, a launch has to wait, as CUDA's does."""

    QUEUE_MS = 60.0
    LAUNCH_MS = 0.5

    def __init__(self, device: SimulatedDevice) -> None:
        super().__init__()
        self.device = device
        self.longest_queue_ms = 0.0

    def advance(self, ms: float) -> None:
        self.device.launch(ms * self._rng.lognormvariate(0, self.noise))
        self.longest_queue_ms = max(self.longest_queue_ms, self.device.free_at_ms - self.device.host_ms)
        self.device.host_ms = max(self.device.host_ms + self.LAUNCH_MS, self.device.free_at_ms - self.QUEUE_MS)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> SimulatedDevice:
    device = SimulatedDevice()
    for module in (fit_timeline, turns):
        monkeypatch.setattr(module, "clock_for", lambda of: EventClock(device.new_event))
    return device


@pytest.fixture
def time(device: SimulatedDevice) -> Iterator[QueuedTime]:
    with simulated(1.5):
        yield QueuedTime(device)


@pytest.mark.parametrize("settings", [{}, {"accumulate_grad_batches": 2}, {"max_epochs": 3}])
def test_no_synchronisation_is_added(time: QueuedTime, device: SimulatedDevice, settings: dict[str, Any]) -> None:
    plugin = fit(Timed(time), 200, **settings)
    assert "over plain, on" in plugin.report.of("tuning").status
    assert device.synchronisations == 0


def test_the_verdict_is_the_devices_though_the_host_runs_ahead(time: QueuedTime) -> None:
    """By the host's clock a launch takes as long with the arm as without it, until the queue is full."""
    model = Timed(time)
    plugin = fit(model, 200)
    assert time.longest_queue_ms > 50
    assert model.seen[-1] == "on"
    interval = plugin.state_dict()["tuning"]["whole"]["interval"]
    assert interval["low"] <= 1.5 <= interval["high"]


def test_events_are_reused(time: QueuedTime, device: SimulatedDevice) -> None:
    fit(Timed(time), 400)
    assert device.events < 100


def test_a_loop_adds_none_either(time: QueuedTime, device: SimulatedDevice) -> None:
    model = Timed(time)
    handle = accelerate(model, Plan(), optimizers=model.configure_optimizers(), steps=200)
    for _ in range(200):
        with handle.step():
            time.advance(10 / (Speed.speedup if Speed.latest.now == "on" else 1.0))
    assert "over plain, on" in handle.report.of("tuning").status
    assert device.synchronisations == 0
    handle.undo()


def test_what_is_paid_for_before_the_time_of_a_step_is_known_is_not_taken_from_it(device: SimulatedDevice) -> None:
    purse, trainer = Purse(), Trainer(accelerator="cpu", logger=False)
    steps = PlainSteps(trainer, purse)
    for _ in range(4):
        steps.batch_comes()
        steps.begin(are_charged=False)
        device.launch(10.0)
        steps.stepped()
        for _ in range(2):  # batches of a validation
            steps.interrupt()
        purse.pay("logging", 1.0)
    device.host_ms = device.free_at_ms
    fit_timeline.timeline_of(trainer).settle()
    assert purse.step_s == pytest.approx(0.01)
