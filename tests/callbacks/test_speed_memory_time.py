"""What SpeedMemoryLogger takes for training time, and what for waiting, by a simulated clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import IterableDataset

from lightning_accel.core import clocks as _clocks
from lightning_accel.lightning import private
from support.measured_runs import ALWAYS_LOGGED, Model, Vectors, fit, loader


class SimulatedTime:
    """What the logger takes for the time, so that a busy machine changes nothing: it passes when a test says so."""

    def __init__(self) -> None:
        self.now_ms = 0.0

    def perf_counter_ns(self) -> int:
        return round(self.now_ms * 1e6)

    def advance(self, by_ms: float) -> None:
        self.now_ms += by_ms


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimulatedTime:
    simulated = SimulatedTime()
    monkeypatch.setattr(_clocks, "perf_counter_ns", simulated.perf_counter_ns)
    return simulated


class Stream(IterableDataset[Tensor]):
    """Has no length, so Lightning fetches a batch ahead."""

    def __init__(self, batches: int, fetch: Callable[[], None] = lambda: None) -> None:
        self.vectors = Vectors(batches, fetch)

    def __iter__(self) -> Iterator[Tensor]:
        return (self.vectors[index] for index in range(len(self.vectors)))


def test_fetching_is_waiting_and_the_step_is_not(clock: SimulatedTime) -> None:
    model = Model(lambda module, batch_idx: clock.advance(10))
    data = Vectors(5, fetch=lambda: clock.advance(30))
    for epoch in fit(model, loader(data=data), max_epochs=2).history:
        assert epoch.data_wait_frac == pytest.approx(0.75)
        assert (epoch.step_ms_p50, epoch.step_ms_p95) == pytest.approx((10, 10))
        assert epoch.steps_per_sec == pytest.approx(25)
        assert epoch.samples_per_sec == pytest.approx(100)


def test_a_loader_without_a_length_is_timed_as_well(clock: SimulatedTime) -> None:
    model = Model(lambda module, batch_idx: clock.advance(10))
    data = Stream(6, fetch=lambda: clock.advance(30))
    first, second = fit(model, loader(data=data), max_epochs=2).history
    # Lightning fetches the first batch of the first epoch before training starts, and always one batch ahead: the
    # third step, which is left out for its FLOPs, takes the fetch of the fourth batch with it.
    assert (first.train_seconds, second.train_seconds) == pytest.approx((5 * 0.01 + 4 * 0.03, 6 * 0.01 + 6 * 0.03))
    assert second.data_wait_frac == pytest.approx(0.75)
    assert first.steps == second.steps == 6


@pytest.mark.filterwarnings("ignore:.*dataloader_iter. ")
def test_a_step_that_fetches_for_itself_waits_inside(clock: SimulatedTime) -> None:
    class Fetching(Model):
        def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
            batch, _, _ = next(dataloader_iter)
            clock.advance(10)
            return self.layer(batch).sum()

    epoch = fit(Fetching(), loader(data=Vectors(5, fetch=lambda: clock.advance(30)))).last
    assert epoch is not None
    assert (epoch.steps, epoch.samples) == (5, 20)
    assert epoch.data_wait_frac == pytest.approx(0.75)
    assert epoch.step_ms_p50 == pytest.approx(10)


def test_validation_within_the_epoch_is_not_training_time(clock: SimulatedTime) -> None:
    class Validating(Model):
        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            clock.advance(1000)

    model = Validating(lambda module, batch_idx: clock.advance(10))
    validation = {"val_dataloaders": loader(1)}
    epoch = fit(model, fit_options=validation, val_check_interval=2, num_sanity_val_steps=0).last
    assert epoch is not None
    assert epoch.steps == 8
    assert epoch.train_seconds == pytest.approx(7 * 0.01)


def test_saving_a_checkpoint_is_not_training_time(tmp_path: Path, clock: SimulatedTime) -> None:
    class SlowToSave(Model):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            clock.advance(1000)

    saving = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1)
    model = SlowToSave(lambda module, batch_idx: clock.advance(10))
    epoch = fit(model, callbacks=[saving], enable_checkpointing=True).last
    assert epoch is not None
    assert epoch.train_seconds == pytest.approx(7 * 0.01)


def test_other_callbacks_between_steps_are_training_time(clock: SimulatedTime) -> None:
    class Slow(Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            clock.advance(5)

    epoch = fit(Model(lambda module, batch_idx: clock.advance(10)), callbacks=[Slow()]).last
    assert epoch is not None
    assert epoch.train_seconds == pytest.approx(7 * 0.01 + 6 * 0.005)
    assert epoch.step_ms_p50 == pytest.approx(10)


def test_a_loop_without_fetch_hooks_only_loses_the_wait(monkeypatch: pytest.MonkeyPatch, clock: SimulatedTime) -> None:
    for name in ("_BEFORE_FETCH", "_AFTER_FETCH"):
        monkeypatch.setattr(private, name, "_of_another_lightning")
    model = Model(lambda module, batch_idx: clock.advance(10))
    epoch = fit(model, loader(data=Vectors(5, fetch=lambda: clock.advance(30)))).last
    assert epoch is not None
    assert epoch.data_wait_frac is None
    # The first fetch is before the first mark, the third step's is left out with that step.
    assert epoch.train_seconds == pytest.approx(4 * 0.01 + 3 * 0.03)
    assert set(epoch.metrics()) == ALWAYS_LOGGED - {"accel/data_wait_frac"}
