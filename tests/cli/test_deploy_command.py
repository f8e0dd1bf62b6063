"""``lightning-accel deploy``, of a checkpoint that a Trainer has written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer
from torchmetrics import MeanSquaredError

from lightning_accel.__main__ import main
from lightning_accel.evidence.record_reader import read_record
from support import served_program
from support.reported_runs import Nested, vectors
from support.reported_runs import make_trainer as make_run

pytestmark = pytest.mark.numbers

PROGRAM = "support.served_program"


@pytest.fixture
def command(make_trainer: Callable[..., Trainer]) -> list[str]:
    """The command for a checkpoint of the program's class."""
    served_program.save(make_trainer(), served_program.Served())
    names = ["--model", f"{PROGRAM}:Served", "--data", f"{PROGRAM}:batches"]
    return ["deploy", "best.ckpt", *names, "--metrics", f"{PROGRAM}:metrics", "--seconds", "0.02"]


def test_forms_are_shown_beside_each_other_and_one_is_recommended(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--forms", "bf16,tensorrt", "--max-drop", "50%"]) == 0
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("p50 ms", "eager", "bf16", "32: samples/s", "MulticlassAccuracy", "Take "))
    assert "! tensorrt: form='tensorrt' needs" in shown


@pytest.mark.medium
def test_a_drop_above_the_limit_is_a_status_of_1_and_named(
    command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Targets are what the model returns: whatever computes otherwise is off, and less is better."""
    model = served_program.Served.load_from_checkpoint("best.ckpt")
    with torch.no_grad():
        exact = [(x, model(x)) for x, _ in served_program.batches()]
    monkeypatch.setattr(served_program, "batches", lambda: exact)
    monkeypatch.setattr(served_program, "metrics", MeanSquaredError)
    assert main([*command, "--forms", "bf16", "--max-drop", "0", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["worse"] == {"bf16": ["MeanSquaredError"]}
    assert main([*command, "--forms", "bf16", "--max-drop", "0"]) == 1
    assert "! bf16: MeanSquaredError is worse by" in capsys.readouterr().out


@pytest.mark.medium
def test_a_checkpoint_in_the_folder_of_its_run_is_compared_in_the_report_of_that(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "logs").fit(Nested(), vectors(8))
    run = read_record(tmp_path / "logs").path.parents[1]
    (run / "checkpoints").mkdir()
    kept = shutil.move("best.ckpt", run / "checkpoints" / "best.ckpt")
    arguments = ["deploy", str(kept), *command[2:], "--forms", "bf16,tensorrt", "--max-drop", "50%"]
    assert main(arguments) == 0
    assert "With its plot in the report of the run: lightning-accel report" in capsys.readouterr().out
    for form in ("html", "md", "json"):
        assert main(["report", str(run), "--out", f"report.{form}"]) == 0
    served = json.loads(Path("report.json").read_text())["served"]
    assert [form["name"] for form in served["forms"]] == ["eager", "bf16"]
    assert "form='tensorrt' needs" in served["left_out"]["tensorrt"]
    assert "## Served forms" in Path("report.md").read_text()
    assert 'aria-label="Latency of served forms' in Path("report.html").read_text()


def test_a_comparison_goes_to_the_run_that_is_named(command: list[str], tmp_path: Path) -> None:
    make_run(tmp_path / "logs").fit(Nested(), vectors(8))
    assert main([*command, "--forms", "eager", "--run", str(tmp_path / "logs")]) == 0
    served = read_record(tmp_path / "logs").served
    assert served is not None
    assert (served.checkpoint, served.recommended) == ("best.ckpt", "eager")
    assert main([*command, "--forms", "eager", "--run", "nowhere"]) == 2


def test_what_is_missing_is_said_and_the_status_is_2(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--data", f"{PROGRAM}:nothing"]) == 2
    assert f"--data {PROGRAM}:nothing" in capsys.readouterr().err
    assert main([*command, "--forms", "onyx"]) == 2
    assert "did you mean 'onnx'" in capsys.readouterr().err
    assert main([*command, "--metrics", f"{PROGRAM}:batches"]) == 2
    assert "a metric of torchmetrics, or a dictionary" in capsys.readouterr().err
    for option, value in (("--seconds", "-3"), ("--forms", ""), ("--seconds", "inf")):
        with pytest.raises(SystemExit, match="2"):
            main([*command, option, value])
        assert option in capsys.readouterr().err


def test_a_broken_file_is_not_taken_for_lost_accuracy(command: list[str]) -> None:
    """Which is what a status of 1 says."""
    Path("best.ckpt").write_text("cut short")
    assert main(command) == 2


@pytest.mark.medium
def test_the_table_shows_whole_names_and_intervals_of_metrics(
    command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    several = {f"{index}_of_a_rather_long_name": MeanSquaredError() for index in range(8)}
    monkeypatch.setattr(served_program, "metrics", lambda: several)
    exact = [(x, torch.zeros(8, 4)) for x, _ in served_program.batches()]
    monkeypatch.setattr(served_program, "batches", lambda: exact)
    assert main([*command, "--forms", "eager"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in several)
    assert len([line for line in shown.splitlines() if line.startswith("eager ")]) == 2
