"""What can be known of a GPU without one, by torch built for CUDA: shapes, dtypes, and kernels that compile."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.skipif(torch.version.cuda is None, reason="this torch is built for CPUs only"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: whatever runs on it is compiled for it"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
]


@pytest.fixture(scope="module")
def prepared() -> list[dict[str, Any]]:
    """In a process of its own, in which torch is told of a card."""
    program = Path(__file__).parent / "support" / "ahead_of_time.py"
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", str(program)], capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]


@pytest.mark.parametrize("dtype", ["torch.float32", "torch.bfloat16"])
def test_what_techniques_return_has_the_plain_runs_shape_dtype_and_device(
    prepared: list[dict[str, Any]], dtype: str
) -> None:
    plain, *others = [line for line in prepared if line.get("asked") == dtype]
    assert (plain["plan"], plain["dtype"], plain["device"]) == ("plain", dtype, "cuda:0")
    assert len(others) == 4
    for found in others:
        assert found["sites"], f"{found['plan']} has changed nothing"
        assert {name: found[name] for name in ("shape", "dtype", "device")} == {
            name: plain[name] for name in ("shape", "dtype", "device")
        }


def test_inductors_kernels_of_the_demos_block_compile_for_the_card(prepared: list[dict[str, Any]]) -> None:
    kernels = [line for line in prepared if "kernel" in line]
    assert kernels
    for kernel in kernels:
        assert kernel["target"] == "sm_90a"
        assert kernel["bytes"]
