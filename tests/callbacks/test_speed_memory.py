"""What SpeedMemoryLogger counts and measures in real training runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.data import DataLoader

from lightning_accel.callbacks import SpeedMemoryLogger
from lightning_accel.core.peak_memory import may_reset_peak
from support.measured_runs import ALWAYS_LOGGED, BATCH_SIZE, STEP_FLOPS, Folder, Model, fit


def test_the_numbers_of_an_epoch_agree_with_each_other() -> None:
    epoch = fit(Model()).last
    assert epoch is not None
    assert (epoch.epoch, epoch.world_size, epoch.steps, epoch.samples) == (0, 1, 8, 32)
    assert epoch.steps_per_sec == pytest.approx(7 / epoch.train_seconds)  # one was slowed by counting FLOPs
    assert epoch.samples_per_sec == pytest.approx(BATCH_SIZE * epoch.steps_per_sec)
    assert 0 < epoch.step_ms_p50 <= epoch.step_ms_p95 <= 1e3 * epoch.train_seconds
    assert epoch.data_wait_frac is not None
    assert 0 < epoch.data_wait_frac < 1
    assert epoch.flops_per_step == STEP_FLOPS
    assert epoch.tflops == pytest.approx(STEP_FLOPS * epoch.steps_per_sec / 1e12)
    assert epoch.peak_memory_mib > 0
    assert epoch.host_rss_mib > 0
    assert (epoch.mfu, epoch.loss_scale, epoch.skipped_steps, epoch.energy_j_per_sample) == (None,) * 4


def test_where_the_system_does_not_tell_of_processes_the_other_numbers_are_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a sandbox without /proc, or once the process can open no file any more."""

    def untold() -> None:
        raise psutil.NoSuchProcess(1)

    monkeypatch.setattr(psutil, "Process", untold)
    epoch = fit(Model()).last
    assert epoch is not None
    assert epoch.host_rss_mib is None
    assert epoch.peak_memory_mib > 0
    assert epoch.samples == 32


def test_a_step_is_a_batch_under_gradient_accumulation() -> None:
    model = Model()
    epoch = fit(model, accumulate_grad_batches=4).last
    assert epoch is not None
    assert (epoch.steps, epoch.samples) == (8, 32)
    assert epoch.flops_per_step == STEP_FLOPS


def test_limited_epochs_count_what_they_trained_on() -> None:
    assert [(e.steps, e.samples) for e in fit(Model(), max_epochs=3, limit_train_batches=3).history] == [(3, 12)] * 3


def test_a_loader_that_is_a_sequence_of_its_batches_is_read_by_the_training_alone(tmp_path: Path) -> None:
    class Batches(Sequence[Tensor]):
        read = 0

        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: Any) -> Tensor:
            if index >= len(self):
                raise IndexError(index)
            self.read += 1
            return torch.ones(BATCH_SIZE, 8)

    batches = Batches()
    fit(Model(), batches, logger=Folder(tmp_path))
    assert batches.read == len(batches)


def test_a_run_that_max_steps_ends_counts_its_part() -> None:
    assert [e.steps for e in fit(Model(), max_epochs=-1, max_steps=11).history] == [8, 3]


def test_manual_optimization_is_measured() -> None:
    class Manual(Model):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.layer(batch).sum())
            optimizer.step()

    epoch = fit(Manual()).last
    assert epoch is not None
    assert (epoch.steps, epoch.flops_per_step) == (8, STEP_FLOPS)


@pytest.mark.filterwarnings("ignore:.*training_step. returned .None.")
def test_a_skipped_step_is_not_the_one_whose_flops_are_counted() -> None:
    epoch = fit(Model(lambda module, batch_idx: "skip" if batch_idx == 2 else None)).last
    assert epoch is not None
    assert epoch.flops_per_step == STEP_FLOPS


@pytest.mark.parametrize(
    "options",
    [
        {"limit_train_batches": 1},
        {"limit_train_batches": 2},
        {"max_steps": 1},
        {"limit_train_batches": 1, "max_epochs": 2},
    ],
    ids=str,
)
def test_of_fewer_than_three_timed_steps_there_are_flops_and_neither_rates_nor_percentiles(
    options: dict[str, Any],
) -> None:
    measured = fit(Model(), **options)
    assert measured.last is not None
    assert measured.last.flops_per_step == STEP_FLOPS
    for epoch in measured.history:
        assert {epoch.samples_per_sec, epoch.steps_per_sec, epoch.step_ms_p50, epoch.step_ms_p95} == {None}
        assert "accel/step_ms_p95" not in epoch.metrics()


def test_the_trials_of_a_short_accelerated_run_are_not_taken_for_its_flops() -> None:
    class Plugin(Precision):
        """Stands for AccelPlugin, which tries its changes in the first two steps."""

    Plugin.__module__ = "lightning_accel.lightning.plugin"
    assert fit(Model(), limit_train_batches=2, plugins=[Plugin()]).history[0].flops_per_step is None
    assert fit(Model(), limit_train_batches=3, plugins=[Plugin()]).history[0].flops_per_step == STEP_FLOPS


def test_flops_are_counted_in_the_third_step_and_once() -> None:
    modes: list[int] = []
    model = Model(lambda module, batch_idx: modes.append(len(_get_current_dispatch_mode_stack())))
    fit(model, max_epochs=2)
    assert modes == [0, 0, 1] + [0] * 13


@pytest.mark.medium
def test_the_peak_is_the_epochs_own() -> None:
    if not may_reset_peak():
        pytest.skip("this system does not let a process reset its high-water mark")

    def allocate(module: Model, batch_idx: int) -> None:
        if module.current_epoch == batch_idx == 0:
            torch.ones(400 * 2**20, dtype=torch.uint8)

    first, second = fit(Model(allocate), max_epochs=2).history
    assert first.peak_memory_mib > second.peak_memory_mib + 200
    assert first.peak_memory_source == "process high-water mark, reset per epoch"


def test_batch_size_fn_is_asked() -> None:
    measured = SpeedMemoryLogger(batch_size_fn=lambda batch: 100)
    fit(Model(), callbacks=[measured])
    assert measured.last is not None
    assert measured.last.samples == 800


def test_a_batch_that_is_not_a_tensor_at_all() -> None:
    class Text(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.layer(torch.ones(1, 8)).sum()

    words = fit(Text(), DataLoader(["a", "b", "c", "d", "e"], batch_size=2)).last
    assert words is not None
    assert words.samples == 5
    numbers = fit(Text(), DataLoader([1, 2, 3, 4], batch_size=None, collate_fn=int)).last
    assert numbers is not None
    assert numbers.steps == 4
    assert (numbers.samples, numbers.samples_per_sec) == (None, None)
    assert set(numbers.metrics()) == ALWAYS_LOGGED - {"accel/samples_per_sec"}


class CountingScaler(torch.amp.GradScaler):
    skipped_steps = 0

    def update(self, new_scale: Any = None) -> None:
        before = self.get_scale()
        super().update(new_scale)
        self.skipped_steps += self.get_scale() < before


def test_loss_scale_and_skipped_steps_are_of_the_epoch() -> None:
    class Overflowing(Model):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            loss = self.layer(batch).sum()
            return loss * math.inf if self.current_epoch == 1 and batch_idx < 2 else loss

    scaler = CountingScaler("cpu", init_scale=1024.0)
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    history = fit(Overflowing(), plugins=[plugin], max_epochs=3).history
    assert [epoch.loss_scale for epoch in history] == [1024, 256, 256]
    assert [epoch.skipped_steps for epoch in history] == [0, 2, 0]
    assert {"accel/loss_scale", "accel/skipped_steps"} <= set(history[0].metrics())


# -- on a GPU ------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_on_cuda_the_allocator_and_the_devices_clock_are_asked(tmp_path: Path) -> None:
    def allocate(module: Model, batch_idx: int) -> None:
        if module.current_epoch == 0:
            torch.empty(256 * 2**20, dtype=torch.uint8, device=module.device)

    first, second = fit(Model(allocate), accelerator="cuda", max_epochs=2).history
    assert first.peak_memory_source == "device allocator's peak, reset per epoch"
    assert first.peak_memory_mib > 256 > second.peak_memory_mib
    assert first.flops_per_step == STEP_FLOPS
    assert first.steps == 8


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*[Ss]ynchronization debug mode is a prototype")
def test_on_cuda_nothing_synchronises_within_a_step() -> None:
    class Forbid(Callback):
        def on_train_batch_start(self, *args: Any) -> None:
            torch.cuda.set_sync_debug_mode("error")

    class Allow(Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            torch.cuda.set_sync_debug_mode("default")

    measured = SpeedMemoryLogger()
    try:
        # The logger's own hooks run between those of the two.
        fit(Model(), accelerator="cuda", callbacks=[Forbid(), measured, Allow()])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert measured.last is not None
    assert measured.last.steps == 8
