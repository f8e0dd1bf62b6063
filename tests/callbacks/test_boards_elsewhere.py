"""What Weights & Biases and MLflow are told beside metrics, offline, each in a process of its own.

They are no part of what developers install: `make test-browser` does.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.scripts import SUPPORT, run_script

pytestmark = pytest.mark.slow

SCRIPT = SUPPORT / "callbacks" / "other_boards.py"


def test_weights_and_biases_gets_a_table_of_text_an_image_config_and_summary(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    printed = run_script(SCRIPT, tmp_path, "wandb", fresh=True, WANDB_MODE="offline", WANDB_SILENT="true")
    told = json.loads(printed.splitlines()[-1])
    assert told["notes"] == []
    assert told["config"]["accel/precision"] == "32-true"
    assert told["summary"]["accel/run/speed_ratio"] == pytest.approx(1.5, rel=0.1)
    (files,) = tmp_path.glob("wandb/offline-run-*/files")
    texts = sorted(files.glob("media/table/accel/summary_*"), key=lambda path: int(path.name.split("_")[1]))
    assert len(texts) == 2  # where it settles, and at its end
    assert "whole plan  faster" in json.loads(texts[-1].read_text())["data"][0][0]
    (arms,) = files.glob("media/table/accel/arms_*")
    assert json.loads(arms.read_text())["data"][0][:2] == ["whole plan", "faster"]
    assert len(list(files.glob("media/images/accel/step_time_*.png"))) == 1


def test_mlflow_gets_artifacts_params_and_metrics(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    printed = run_script(SCRIPT, tmp_path, "mlflow", fresh=True, MLFLOW_ALLOW_FILE_STORE="true")
    told = json.loads(printed.splitlines()[-1])
    assert told["notes"] == []
    assert told["config"]["accel/precision"] == "32-true"
    assert told["summary"]["accel/run/speed_ratio"] == pytest.approx(1.5, rel=0.1)
    (artifacts,) = tmp_path.glob("mlruns/*/*/artifacts/accel")
    assert "whole plan  faster" in (artifacts / "summary.md").read_text()
    assert json.loads((artifacts / "arms.json").read_text())["whole plan"]["accel/verdict"] == "faster"
    assert (artifacts / "step_time.png").read_bytes().startswith(b"\x89PNG")
