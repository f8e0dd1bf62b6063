"""Where SpeedMemoryLogger's numbers go: to every logger, to callbacks that monitor them, or onto the screen."""

from __future__ import annotations

from pathlib import Path

import pytest
from lightning.pytorch import Trainer
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


def test_without_a_logger_each_epoch_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    fit(Model(), max_epochs=2, logger=False)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("accel/")]
    assert len(lines) == 2
    for words in ("samples/s", "steps/s", "p95", "data wait", "peak", "high-water mark", "host RSS", "TFLOP/s"):
        assert words in lines[0]


def test_with_a_logger_nothing_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(Model(), logger=CSVLogger(tmp_path), log_every_n_steps=1)
    assert "accel/" not in capsys.readouterr().out


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
