"""Runs the tests that compare numbers with torch's libraries told to be on other processors.

python as_other_cpus.py WORKERS, of which pytest-xdist starts as many. A setting is left out, with a word, where this
processor lacks the instructions, or where it changes nothing: a probe of one computation of each kind that libraries
have several kernels for then gives the very bits of a setting before it.
"""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

SETTINGS = (
    "OMP_NUM_THREADS=1",
    "OMP_NUM_THREADS=2",
    "ATEN_CPU_CAPABILITY=default",
    "ATEN_CPU_CAPABILITY=avx2",
    "ATEN_CPU_CAPABILITY=avx512",
    "ONEDNN_MAX_CPU_ISA=SSE41",
    "ONEDNN_MAX_CPU_ISA=AVX2",
    "ONEDNN_MAX_CPU_ISA=AVX512_CORE",
    "MKL_ENABLE_INSTRUCTIONS=SSE4_2",
    "MKL_ENABLE_INSTRUCTIONS=AVX2",
    "MKL_ENABLE_INSTRUCTIONS=AVX512",
    "MKL_CBWR=COMPATIBLE",
)
_FAULTS = (-signal.SIGILL, -signal.SIGSEGV)  # what comes of instructions that a processor has not


def main(workers: str) -> int:
    said: dict[str, str] = {}
    first_with: dict[str, str] = {}
    for setting in SETTINGS:
        bits = probed(setting)
        if bits is None:
            said[setting] = "left out: this processor has no such instructions"
        elif bits in first_with:
            said[setting] = f"left out: the bits are those of {first_with[bits]}"
        else:
            first_with[bits] = setting
            print(f"== {setting}", flush=True)
            said[setting] = "passed" if passes(setting, workers) else "FAILED"
    for setting, outcome in said.items():
        print(f"{setting:<32} {outcome}")
    return int("FAILED" in said.values())


def with_setting(setting: str) -> dict[str, str]:
    name, _, value = setting.partition("=")
    return {**os.environ, "OMP_NUM_THREADS": "1", name: value}


def probed(setting: str) -> str | None:
    """What the probe computes under a setting; None where the processor cannot."""
    run = subprocess.run(
        [sys.executable, __file__, "--probe"], env=with_setting(setting), stdout=subprocess.PIPE, text=True
    )
    if run.returncode in _FAULTS:
        return None
    run.check_returncode()
    return run.stdout


def passes(setting: str, workers: str) -> bool:
    if setting == "OMP_NUM_THREADS=2":  # a worker takes as many processors as it has threads
        workers = str(max(1, int(workers) // 2))
    marked = ["-m", "numbers and not gpu and not slow", "-n", workers, "--dist", "loadfile", "-q"]
    command = [sys.executable, "-m", "pytest", *marked]
    return subprocess.run(command, env=with_setting(setting), cwd=Path(__file__).parents[1]).returncode == 0


def probe() -> str:
    """The bits of one computation of each kind that the libraries choose kernels for."""
    torch.manual_seed(0)
    image, kernel = torch.randn(2, 8, 20, 20), torch.randn(16, 8, 3, 3)
    rows, weight = torch.randn(200, 300), torch.randn(300, 300)
    heads = torch.randn(2, 4, 50, 16)
    covariance = weight @ weight.mT + torch.eye(300)
    lstm = torch.nn.LSTM(300, 20)
    results: list[Tensor] = [image, rows.sum(), rows.exp(), rows.softmax(-1), F.gelu(rows), F.layer_norm(rows, (300,))]
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        results += [rows.to(dtype) @ weight.to(dtype), heads.to(dtype) @ heads.to(dtype).mT]
        results += [F.conv2d(image.to(dtype), kernel.to(dtype)), F.scaled_dot_product_attention(*[heads.to(dtype)] * 3)]
    results += [F.conv2d(image.contiguous(memory_format=torch.channels_last), kernel), lstm(rows)[0]]
    results += [torch.linalg.cholesky(covariance), torch.linalg.eigvalsh(covariance), torch.linalg.inv(covariance)]
    every = torch.cat([result.detach().double().flatten() for result in results])
    return hashlib.sha256(every.numpy().tobytes()).hexdigest()


if __name__ == "__main__":
    if sys.argv[1] == "--probe":
        print(probe())
    else:
        raise SystemExit(main(sys.argv[1]))
