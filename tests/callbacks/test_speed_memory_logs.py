"""Where SpeedMemoryLogger's numbers go: to every logger, to callbacks that monitor them, or onto the screen."""

from __future__ import annotations

import csv
import time
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lightning_accel.callbacks import SpeedMemoryLogger
from support.measured_runs import ALWAYS_LOGGED, Model, fit, loader


def test_every_logger_gets_every_metric_of_every_epoch(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board, table = TensorBoardLogger(tmp_path / "tb"), CSVLogger(tmp_path / "csv", flush_logs_every_n_steps=1)
    measured = fit(Model(), max_epochs=2, logger=[board, table], log_every_n_steps=1)
    events = EventAccumulator(board.log_dir).Reload()
    assert {tag for tag in events.Tags()["scalars"] if tag.startswith("accel/")} == ALWAYS_LOGGED
    for name in ALWAYS_LOGGED:
        logged = [event.value for event in events.Scalars(name)]
        assert logged == pytest.approx([epoch.metrics()[name] for epoch in measured.history], rel=1e-6)
    header = (Path(table.log_dir) / "metrics.csv").read_text().splitlines()[0].split(",")
    assert set(header) >= ALWAYS_LOGGED


@pytest.mark.parametrize("has_logger", [True, False])
def test_no_epoch_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str], *, has_logger: bool) -> None:
    fit(Model(), max_epochs=2, logger=CSVLogger(tmp_path) if has_logger else False, log_every_n_steps=1)
    assert "accel" not in capsys.readouterr().out


def rows_of(folder: str) -> list[dict[str, str]]:
    """What a CSVLogger was told of ours."""
    with (Path(folder) / "metrics.csv").open(newline="", encoding="utf-8") as file:
        return [row for row in csv.DictReader(file) if row.get("accel/steps_per_sec")]


def test_epochs_of_milliseconds_are_told_together(tmp_path: Path) -> None:
    logger, measured = CSVLogger(tmp_path), SpeedMemoryLogger(every_s=60.0)
    fit(Model(), max_epochs=5, logger=logger, callbacks=[measured], log_every_n_steps=1)
    (speed,) = measured.history
    assert (speed.first_epoch, speed.epoch, speed.steps, speed.samples) == (0, 4, 40, 160)
    (row,) = rows_of(logger.log_dir)
    assert float(row["accel/samples_per_sec"]) == pytest.approx(speed.samples_per_sec)


def test_the_last_epochs_of_a_run_that_ends_early_are_told(tmp_path: Path) -> None:
    """By a callback that comes after the logger: at the epoch's end it does not know that no other is to come."""

    class Stops(Callback):
        def on_train_epoch_end(self, trainer: Trainer, *_: Any) -> None:
            trainer.should_stop = trainer.current_epoch == 2

    logger, measured = CSVLogger(tmp_path), SpeedMemoryLogger(every_s=60.0)
    fit(Model(), max_epochs=9, logger=logger, callbacks=[measured, Stops()], log_every_n_steps=1)
    assert [(speed.first_epoch, speed.epoch, speed.steps) for speed in measured.history] == [(0, 2, 24)]
    assert len(rows_of(logger.log_dir)) == 1


def test_what_is_monitored_is_told_of_every_epoch(tmp_path: Path) -> None:
    kept = ModelCheckpoint(tmp_path, monitor="accel/samples_per_sec", mode="max")
    measured = SpeedMemoryLogger(every_s=60.0)
    fit(Model(), max_epochs=3, callbacks=[measured, kept], enable_checkpointing=True)
    assert [speed.epoch for speed in measured.history] == [0, 1, 2]


def test_validation_between_epochs_that_are_told_together_is_none_of_their_time() -> None:
    class Validates(Model):
        def on_validation_epoch_end(self) -> None:
            time.sleep(0.2)

    measured = SpeedMemoryLogger(every_s=60.0)
    fit(Validates(), loader(4), fit_options={"val_dataloaders": loader(1)}, max_epochs=3, callbacks=[measured])
    (speed,) = measured.history
    assert speed.train_seconds < 0.2


def test_metrics_can_be_monitored(tmp_path: Path) -> None:
    checkpoints = ModelCheckpoint(tmp_path, monitor="accel/samples_per_sec", mode="max")
    stopping = EarlyStopping(monitor="accel/peak_memory_mib", mode="max", patience=0, min_delta=1e9)
    measured = fit(Model(), max_epochs=5, callbacks=[checkpoints, stopping], enable_checkpointing=True)
    assert len(measured.history) == 2  # no gain in the second epoch
    assert checkpoints.best_model_score.item() == pytest.approx(max(e.samples_per_sec or 0 for e in measured.history))


def test_a_barebones_trainer_is_measured_and_not_logged_to(capsys: pytest.CaptureFixture[str]) -> None:
    measured = SpeedMemoryLogger()
    trainer = Trainer(barebones=True, accelerator="cpu", devices=1, max_epochs=1, callbacks=[measured])
    trainer.fit(Model(), loader())
    assert measured.last is not None
    assert measured.last.steps == 8
    assert "accel/" not in capsys.readouterr().out


def test_a_fast_development_run_works() -> None:
    assert len(fit(Model(), fast_dev_run=True).history) == 1


def test_validation_alone_is_not_measured() -> None:
    measured = SpeedMemoryLogger()
    trainer = Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, callbacks=[measured])
    trainer.validate(Model(), loader(), verbose=False)
    assert measured.history == []
    assert measured.last is None
