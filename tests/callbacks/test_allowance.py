"""What the plugin's own logger does in a run that cannot pay for more, and in one that can."""

from __future__ import annotations

import csv
import time
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor

from lightning_accel import AccelPlugin
from lightning_accel.callbacks import SpeedMemoryLogger
from lightning_accel.callbacks._allowance import LOGGING, Allowance
from lightning_accel.core.purse import Purse
from lightning_accel.evidence.record_reader import read_record
from lightning_accel.settings import Plan
from support.console import heard
from support.measured_runs import Folder, Model, loader
from support.technique_table import off

OFF: dict[str, Any] = off()


def fit(model: Model, batches: int = 8, *, logger: Any = False, accel: Any = None, **options: Any) -> Trainer:
    """Trains with the plugin's own logger, and nothing else of the plugin's."""
    quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    plugin = AccelPlugin.from_plan(Plan().replace(**OFF | (accel or {})))
    settings = {"accelerator": "cpu", "max_epochs": 1, "logger": logger, "plugins": [plugin], **quiet, **options}
    trainer = Trainer(**settings)
    trainer.fit(model, loader(batches))
    return trainer


def told(logger: CSVLogger) -> list[dict[str, str]]:
    with (Path(logger.log_dir) / "metrics.csv").open(newline="", encoding="utf-8") as file:
        return [row for row in csv.DictReader(file) if row.get("accel/steps_per_sec")]


def test_a_short_run_has_its_metrics_told_once_and_leaves_neither_record_nor_figures(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    fit(Model(), logger=logger, max_epochs=3)
    (row,) = told(logger)
    assert float(row["accel/steps_per_sec"]) > 0
    assert "accel/tflops" not in row  # no step was counted
    assert not (Path(logger.log_dir) / "accel").exists()


def test_without_a_logger_it_says_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with heard() as lines:
        fit(Model(), max_epochs=3)
    (line,) = (line for line in lines if "waiting for data" not in line)  # advice, which hangs on the machine
    assert "samples/s" in line
    assert capsys.readouterr().out == ""


@pytest.mark.medium
def test_a_report_that_is_asked_for_has_all_there_is(tmp_path: Path) -> None:
    with heard() as lines:
        fit(Model(), accel={"report": str(tmp_path / "report.md")})
    record = read_record(tmp_path)
    assert record.num_steps == 8
    assert record.anatomy is not None
    assert not any("lightning-accel report" in line for line in lines)  # it is there already


class Long(Model):
    """Takes its time, and ends long before it was to."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        time.sleep(0.005)
        self.trainer.should_stop = batch_idx == 30
        return super().training_step(batch, batch_idx)


def test_a_run_that_is_to_take_hours_pays_for_its_record_in_its_first_steps(tmp_path: Path) -> None:
    fit(Long(), 40, logger=Folder(tmp_path), max_epochs=100_000)
    record = read_record(tmp_path)
    assert record.steps[0].first == 1
    assert record.num_steps == 31


def allowance_of(purse: Purse, **options: Any) -> Allowance:
    trainer = Trainer(accelerator="cpu", logger=False)
    precision = Precision()
    precision.purse = purse  # type: ignore[attr-defined]
    trainer.strategy._precision_plugin = precision
    return Allowance(trainer, **options)


def test_it_is_a_fifth_of_a_percent_of_the_run() -> None:
    purse = Purse(clock=iter(range(100)).__next__)  # type: ignore[arg-type]
    purse.steps, purse.done = 10_000, 5_000
    purse.step_took(1.0)
    allowance = allowance_of(purse, is_asked=False)
    assert allowance.can_pay(20.0)
    assert not allowance.can_pay(20.1)
    with allowance.paying():  # a second by that clock
        pass
    assert purse.spent_s[LOGGING] == 1
    assert not allowance.can_pay(19.5)
    assert allowance_of(purse, is_asked=True).can_pay(19.5)


def test_a_logger_among_the_users_callbacks_is_asked_for(tmp_path: Path) -> None:
    measured = SpeedMemoryLogger()
    fit(Model(), logger=Folder(tmp_path), callbacks=[measured])
    assert measured.last is not None
    assert measured.last.flops_per_step
    assert read_record(tmp_path).anatomy is not None
