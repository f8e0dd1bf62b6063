"""Each strategy on one GPU, NCCL with a single rank: the numbers are those of SingleDeviceStrategy."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from support.scripts import SUPPORT
from support.strategies.gpu_runs import RUNS, STRATEGIES

pytestmark = [pytest.mark.gpu, pytest.mark.needs_kernels("NCCL")]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    file = tmp_path_factory.mktemp("gpu_runs") / "said.json"
    script = SUPPORT / "strategies" / "gpu_runs.py"
    run = subprocess.run([sys.executable, script, file], capture_output=True, text=True, timeout=500)
    assert run.returncode == 0, run.stderr
    read: dict[str, Any] = json.loads(file.read_text())
    return read


@pytest.mark.parametrize("strategy", STRATEGIES[1:])
@pytest.mark.parametrize("run", RUNS)
def test_losses_are_those_of_a_single_device(said: dict[str, Any], strategy: str, run: str) -> None:
    # Under FSDP weights are gathered in the low precision, and what autocast keeps in float32 is made of those.
    tolerance = 1e-5 if RUNS[run]["precision"] == "32-true" else 2e-2
    assert said[f"{strategy}, {run}"]["losses"] == pytest.approx(said[f"plain, {run}"]["losses"], rel=tolerance)
