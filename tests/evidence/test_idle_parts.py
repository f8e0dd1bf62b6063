"""What a record says of a device that waits for its host. The device is simulated, and what it has to do is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from lightning_accel.callbacks import _fit_timeline, _phase_sampler
from lightning_accel.callbacks._phase_sampler import EVERY, HOLD_AT
from lightning_accel.core.clocks import EventClock
from lightning_accel.evidence.phase_names import BACKWARD, FORWARD, IDLE
from lightning_accel.evidence.record import Record
from lightning_accel.evidence.record_reader import read_record
from support.measured_runs import Folder, Model, fit, loader
from support.simulated_device import SimulatedDevice

STEPS = 6 * EVERY  # of which five are looked at, and one of these is held back


class Computes(Model):
    """On a simulated device: its host takes 10 ms to have a kernel of ``kernel_ms`` begin, in forward and backward."""

    def __init__(self, device: SimulatedDevice, kernel_ms: float) -> None:
        super().__init__()
        self.simulated, self.kernel_ms = device, kernel_ms

    def launch(self) -> None:
        self.simulated.host_ms += 10
        self.simulated.launch(self.kernel_ms)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        self.launch()
        return super().training_step(batch, batch_idx)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self.launch()
        super().backward(loss, *args, **kwargs)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> SimulatedDevice:
    device = SimulatedDevice()
    monkeypatch.setattr(_fit_timeline, "clock_for", lambda _: EventClock(device.new_event))
    monkeypatch.setattr(_phase_sampler, "hold_device", lambda ms: device.launch(100))
    return device


def recorded(folder: Path, device: SimulatedDevice, kernel_ms: float) -> tuple[Record, Any]:
    measured = fit(Computes(device, kernel_ms), loader(STEPS), logger=Folder(folder))
    return read_record(folder), measured


def test_what_a_device_waits_for_its_host_is_a_part_of_its_own(device: SimulatedDevice, tmp_path: Path) -> None:
    record, _ = recorded(tmp_path, device, kernel_ms=4)
    found = record.parts_ms()
    # Of 10 ms from the one launch to the next the device works 4.
    assert (found[FORWARD], found[BACKWARD]) == pytest.approx((4, 4))
    assert found[IDLE] == pytest.approx(2 * 6, abs=6)
    assert sum(found.values()) == pytest.approx(20)


def test_a_device_that_is_busy_has_no_such_part_to_speak_of(device: SimulatedDevice, tmp_path: Path) -> None:
    record, _ = recorded(tmp_path, device, kernel_ms=15)
    found = record.parts_ms()
    assert found[IDLE] == 0
    assert (found[FORWARD], found[BACKWARD]) == pytest.approx((15, 15))


def test_a_step_that_is_held_back_is_none_of_those_that_count(device: SimulatedDevice, tmp_path: Path) -> None:
    record, measured = recorded(tmp_path, device, kernel_ms=4)
    (some,) = record.steps
    assert some.looked_at == STEPS // EVERY - 2  # the one that is held back, and the one that has just begun
    assert some.timed == STEPS - 2  # one is taken apart
    assert max(some.cycle_ms) < 100
    assert measured.last.steps == STEPS
    assert HOLD_AT < STEPS // EVERY


def test_on_a_cpu_there_is_no_such_part(tmp_path: Path) -> None:
    fit(Model(), loader(STEPS), logger=Folder(tmp_path))
    assert IDLE not in read_record(tmp_path).parts_ms()


@pytest.mark.needs_kernels("a device's own time")
@pytest.mark.gpu
def test_a_gpu_that_gets_short_kernels_waits_for_its_host(tmp_path: Path) -> None:
    fit(Model(), loader(STEPS), logger=Folder(tmp_path), accelerator="gpu")
    record = read_record(tmp_path)
    found = record.parts_ms()
    assert found[IDLE] > 0
    assert all(found[part] > 0 for part in (FORWARD, BACKWARD))
