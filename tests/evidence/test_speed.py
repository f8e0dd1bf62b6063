"""One run has one speed, wherever it is told."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor

from lightning_accel import AccelPlugin
from lightning_accel.__main__ import main
from lightning_accel.callbacks import SpeedMemoryLogger
from lightning_accel.evidence.amounts import duration, rate
from lightning_accel.evidence.record_reader import read_record
from lightning_accel.evidence.report_model import page_of
from lightning_accel.evidence.speed import speed_of
from lightning_accel.settings import Plan
from support.console import heard
from support.measured_runs import Model, fit, loader
from support.reported_runs import record_of, steps
from support.technique_table import off
from support.tensorboard_files import hparams_of


class Varies(Model):
    """Its first steps and its last epoch are slow, and so is its validation."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        time.sleep(0.004 if self.global_step < 4 or self.current_epoch == 2 else 0.001)
        return super().training_step(batch, batch_idx)

    def on_validation_epoch_end(self) -> None:
        time.sleep(0.05)


def first_number(text: str) -> float:
    found = re.search(r"([\d,.]+) samples/s", text)
    assert found is not None, text
    return float(found[1].replace(",", ""))


def test_console_loggers_page_and_compare_tell_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logger, validated = TensorBoardLogger(tmp_path), {"val_dataloaders": loader(2)}
    plugin = AccelPlugin.from_plan(Plan().replace(**off() | {"precision": "32-true"}))
    with heard() as lines:
        fit(Varies(), loader(20), max_epochs=3, logger=logger, fit_options=validated, plugins=[plugin])
    record = read_record(Path(logger.log_dir))
    speed = speed_of(record.steps, record.held.step, 1)
    assert speed is not None
    assert main(["compare", logger.log_dir, logger.log_dir, "--json"]) == 0
    compared = [float(value) for value in re.findall(r"^ +(\d+\.\d+),?$", capsys.readouterr().out, re.MULTILINE)]
    assert hparams_of(f"{logger.log_dir}/accel")["accel/run/samples_per_sec"] == pytest.approx(
        speed.per_second, rel=1e-6
    )
    assert speed.per_second in compared
    assert str(speed) in lines[-1]
    assert page_of(record).speed == str(speed)
    slowest = [epoch["samples_per_sec"] for epoch in record.epochs]
    assert min(slowest) < speed.per_second < max(slowest)  # of all epochs, and of none alone


def test_it_is_that_of_the_steps_since_live_trials_had_settled() -> None:
    run = [steps(1, 20.0), steps(65, 10.0)]
    assert speed_of(run, 64, 1) == speed_of(run[1:], None, 1)
    assert speed_of(run, 64, 1).per_second == pytest.approx(400)  # four samples in 10 ms


def test_of_ranks_the_samples_add_up_and_the_steps_are_taken_together() -> None:
    unknown = [replace(steps(1, 10.0), samples=None)]
    assert speed_of([steps(1, 10.0)], None, 2).per_second == pytest.approx(800)
    assert str(speed_of(unknown, None, 2)) == "100 steps/s"


@pytest.mark.parametrize("batches", [1, 2, 3])
def test_of_fewer_than_three_timed_steps_it_is_not_measured(tmp_path: Path, batches: int) -> None:
    """One of them is slowed by counting its FLOPs."""
    logger = TensorBoardLogger(tmp_path)
    with heard() as lines:
        fit(Model(), loader(batches), logger=logger, log_every_n_steps=1)
    assert "speed not measured" in lines[-1]
    assert page_of(read_record(Path(logger.log_dir))).speed == ""


def test_a_page_of_a_run_that_was_slow_at_first_shows_what_compare_shows(tmp_path: Path) -> None:
    record: Any = record_of(steps=[steps(1, 40.0), *(steps(1 + 64 * place, 10.0) for place in range(1, 10))])
    assert page_of(record).speed == "400 samples/s"


@pytest.mark.parametrize(
    ("ms", "shown"), [(10_850.0, "10.8 s"), (9_400.0, "9,400 ms"), (246.64, "247 ms"), (2.345, "2.35 ms")]
)
def test_a_time_is_written_as_people_write_it(ms: float, shown: str) -> None:
    assert duration(ms) == shown


@pytest.mark.parametrize(("value", "shown"), [(10_850.4, "10,850"), (246.64, "246.6"), (0.3112, "0.3112")])
def test_a_rate_is_written_as_people_write_it(value: float, shown: str) -> None:
    assert rate(value) == shown


def test_a_logger_tells_the_interval_of_each_of_its_measurements() -> None:
    measured = SpeedMemoryLogger(every_s=0.0)
    fit(Model(), max_epochs=2, callbacks=[measured])
    assert [(speed.first_epoch, speed.epoch) for speed in measured.history] == [(0, 0), (1, 1)]
