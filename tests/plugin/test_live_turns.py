"""Turns of live trials, whatever shape a run has: one is over where its step is, and what comes then is not timed."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_accel import AccelPlugin
from lightning_accel.callbacks._epoch_ends import turns_left
from lightning_accel.tuning.trials import LiveTrials
from support.live_runs import BATCH_SIZE, SimulatedTime, Speed, Timed, batches, fit, simulated

pytestmark = pytest.mark.numbers

SPEEDUP = 1.4


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A run of some hundred steps.

    Attributes:
        steps: Of the optimizer, that there are.
        batches: In an epoch.
        settings: The Trainer's.
        batches_a_turn: That are accumulated, and there.
        manual: Whether it steps its optimizers by hand, and how many it has.
    """

    steps: int
    batches: int
    batches_a_turn: int = 1
    settings: dict[str, Any] = field(default_factory=dict)
    manual: int = 0


VALIDATES = {"val": 1, "num_sanity_val_steps": 0}
SHAPES = {
    "one step an epoch": Shape(steps=150, batches=1, settings={"max_epochs": 150}),
    "one, and validation": Shape(steps=120, batches=1, settings={"max_epochs": 120, **VALIDATES}),
    "two steps an epoch": Shape(steps=150, batches=2, settings={"max_epochs": 75}),
    "two, and validation": Shape(steps=120, batches=2, settings={"max_epochs": 60, **VALIDATES}),
    "validation after each step": Shape(steps=120, batches=120, settings={"val_check_interval": 1, **VALIDATES}),
    "check_val_every_n_epoch": Shape(
        steps=120, batches=2, settings={"max_epochs": 60, "check_val_every_n_epoch": 2, **VALIDATES}
    ),
    "limit_train_batches": Shape(steps=150, batches=9, settings={"limit_train_batches": 1, "max_epochs": 150}),
    "max_steps": Shape(steps=150, batches=1, settings={"max_steps": 150, "max_epochs": -1}),
    "a whole epoch accumulated": Shape(
        steps=120, batches=2, batches_a_turn=2, settings={"accumulate_grad_batches": 2, "max_epochs": 120}
    ),
    "less than was to be accumulated": Shape(
        steps=120, batches=1, settings={"accumulate_grad_batches": 4, "max_epochs": 120}
    ),
    "validation while it accumulates": Shape(
        steps=120,
        batches=240,
        batches_a_turn=2,
        settings={"accumulate_grad_batches": 2, "val_check_interval": 1, **VALIDATES},
    ),
    "manual optimization": Shape(steps=120, batches=1, settings={"max_epochs": 120, **VALIDATES}, manual=1),
    "two optimizers by hand": Shape(steps=120, batches=1, settings={"max_epochs": 120}, manual=2),
}


class Slow(Timed):
    """All that is no step takes as long as fifty of them, so that nothing could be told if it were timed."""

    def on_train_epoch_end(self) -> None:
        self.time.advance(500)

    def on_train_epoch_start(self) -> None:
        self.time.advance(500)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.time.advance(500)


@pytest.fixture
def took(monkeypatch: pytest.MonkeyPatch) -> list[float | None]:
    """What the trials are told that their turns took, in milliseconds."""
    told: list[float | None] = []
    original = LiveTrials.took

    def noted(trials: LiveTrials, seconds: float | None) -> None:
        told.append(None if seconds is None else seconds * 1e3)
        original(trials, seconds)

    monkeypatch.setattr(LiveTrials, "took", noted)
    return told


def run(time: SimulatedTime, shape: Shape, **more: Any) -> tuple[Timed, AccelPlugin]:
    model = Slow(time, manual=shape.manual > 0, optimizers=max(1, shape.manual))
    settings = {**shape.settings, **more}
    if "val" in settings:
        settings["val"] = batches(settings["val"])
    return model, fit(model, shape.batches, **settings)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_every_turn_counts_by_its_steps_alone_and_the_run_settles(shape: Shape, took: list[float | None]) -> None:
    with simulated(SPEEDUP) as time:
        model, plugin = run(time, shape)
    assert model.seen[-1] == "on"
    assert "over plain, on" in plugin.report.of("tuning").status
    assert len(took) > 0.9 * shape.steps
    assert max(ms or 1e3 for ms in took) < 11 * shape.batches_a_turn


def test_a_plan_that_is_slower_goes_in_a_run_of_one_step_an_epoch() -> None:
    with simulated(0.8) as time:
        model, _ = run(time, SHAPES["one, and validation"])
    assert model.seen[-1] == "off"
    assert model.seen.count("on") < 60


@pytest.mark.medium
def test_saving_after_every_step_is_not_timed(took: list[float | None], tmp_path: Path) -> None:
    saving = ModelCheckpoint(tmp_path, every_n_train_steps=1)
    with simulated(SPEEDUP) as time:
        run(time, SHAPES["one step an epoch"], callbacks=[saving], enable_checkpointing=True)
    assert max(ms or 1e3 for ms in took) < 11


def test_what_the_users_own_hook_does_after_a_step_is_timed(took: list[float | None]) -> None:
    """It may read weights in a layout that an arm has chosen."""

    class Averaging(Callback):
        def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *args: Any) -> None:
            time.advance(30)

    with simulated(SPEEDUP) as time:
        run(time, SHAPES["one step an epoch"], callbacks=[Averaging()])
    assert min(ms for ms in took if ms is not None) > 30


def test_arms_are_switched_before_a_batch_is_transferred() -> None:
    class Transferring(Slow):
        def __init__(self, time: SimulatedTime) -> None:
            super().__init__(time)
            self.transferred: list[str] = []

        def transfer_batch_to_device(self, batch: Any, *args: Any) -> Any:
            if self.trainer.training:
                self.transferred.append(Speed.latest.now)
            return batch

    with simulated(SPEEDUP) as time:
        fit(model := Transferring(time), 1, max_epochs=100, val=batches(1), num_sanity_val_steps=0)
    assert model.transferred == model.seen
    assert {"on", "off"} == set(model.seen)


class FixedCosts(Timed):
    """A step takes as long with few samples as with many."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return super().training_step([torch.ones(BATCH_SIZE, 8)], batch_idx)


def rests(sizes: list[int]) -> DataLoader[Any]:
    data = [torch.ones(size, 8) for size in sizes]
    return DataLoader(data, batch_size=None, collate_fn=lambda tensor: [tensor])  # type: ignore[arg-type]


@pytest.mark.parametrize("sizes", [[4, 1], [4, 2], [4, 3], [4, 4, 4, 1]], ids=str)
def test_the_rest_at_the_end_of_an_epoch_is_not_compared_by_element(sizes: list[int], took: list[float | None]) -> None:
    with simulated(SPEEDUP) as time:
        plugin = fit(FixedCosts(time), loader=rests(sizes), max_epochs=240 // len(sizes))
    assert "over plain, on" in plugin.report.of("tuning").status
    assert None not in took
    assert max(ms for ms in took if ms is not None) < 11


@pytest.mark.medium
def test_batches_left_over_by_accumulation_are_not_compared_by_element(took: list[float | None]) -> None:
    with simulated(SPEEDUP) as time:
        plugin = fit(Slow(time), 5, accumulate_grad_batches=4, max_epochs=100)
    assert "over plain, on" in plugin.report.of("tuning").status
    assert max(ms for ms in took if ms is not None) < 44


class Stream(IterableDataset[list[Tensor]]):
    """Nobody knows how long it is: a batch is fetched before the one before it is trained on."""

    def __iter__(self) -> Any:
        return iter([[torch.ones(BATCH_SIZE, 8)]] * 2)


def test_fetchers_that_look_ahead(took: list[float | None]) -> None:
    with simulated(SPEEDUP) as time:
        plugin = fit(Slow(time), loader=DataLoader(Stream(), batch_size=None), max_epochs=100)
    assert "over plain, on" in plugin.report.of("tuning").status
    assert None not in took


def test_an_epoch_that_a_hook_cuts_short_costs_no_turn(took: list[float | None]) -> None:
    class Cut(Slow):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 2 else None

    with simulated(SPEEDUP) as time:
        plugin = fit(Cut(time), 4, max_epochs=100)
    assert "over plain, on" in plugin.report.of("tuning").status
    assert max(ms for ms in took if ms is not None) < 11


def test_a_step_that_saves_within_itself_does_not_count(took: list[float | None], tmp_path: Path) -> None:
    class Saving(Slow):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            if self.trainer.current_epoch % 3 == 0:
                self.trainer.save_checkpoint(tmp_path / "mine.ckpt")
            return super().training_step(batch, batch_idx)

    with simulated(SPEEDUP) as time:
        fit(Saving(time), 1, max_epochs=80)
    assert max(ms for ms in took if ms is not None) < 11


def test_a_step_that_validates_within_itself_does_not_count(took: list[float | None]) -> None:
    class Nested(Slow):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            if self.trainer.current_epoch % 3 == 0:
                with self.trainer.precision_plugin.val_step_context():
                    self.time.advance(500)
            return super().training_step(batch, batch_idx)

    with simulated(SPEEDUP) as time:
        plugin = fit(Nested(time), 1, max_epochs=200)
    assert "over plain, on" in plugin.report.of("tuning").status
    assert max(ms for ms in took if ms is not None) < 11


@pytest.mark.parametrize(
    ("count", "settings", "turns"),
    [
        (1, {"accumulate_grad_batches": 4, "max_epochs": 7}, 7),
        (5, {"accumulate_grad_batches": 4, "max_epochs": 7}, 14),
        (8, {"accumulate_grad_batches": 4, "max_epochs": 7}, 14),
        (1, {"max_steps": 9, "max_epochs": -1}, 9),
        (9, {"limit_train_batches": 1, "max_epochs": 7}, 7),
    ],
    ids=str,
)
def test_how_many_turns_a_fit_has(count: int, settings: dict[str, Any], turns: int) -> None:
    class Asking(Timed):
        left: float | None = None

        def on_train_start(self) -> None:
            self.left = turns_left(self.trainer)

    with simulated(SPEEDUP) as time:
        fit(model := Asking(time), count, **settings)
    assert model.left == model.trainer.global_step == turns
