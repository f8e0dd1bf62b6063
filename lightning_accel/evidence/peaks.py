"""What a device can do at most, measured in a moment: products a second, and bytes read and written a second.

A roofline (Williams, Waterman and Patterson, "Roofline: An Insightful Visual Performance Model for Multicore
Architectures", 2009, https://doi.org/10.1145/1498765.1498785) asks how near each module comes to either.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from lightning_accel.experiment.time_calls import time_calls

_SIZE = {"cpu": 1024, "cuda": 4096}  # of square matrices: large enough to be bound by products
_COPIED = {"cpu": 1 << 24, "cuda": 1 << 27}  # elements: more than a cache has
_ROUNDS = 5
_REPEATS_ON_GPU = 16  # a call takes a fifth of a millisecond there


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """The best of a few rounds."""

    float32_flops: float  # FLOPs a second of a product of float32 matrices, at the precision that is set for them
    bfloat16_flops: float  # of one of bfloat16 matrices
    bytes_per_sec: float  # read and written, by a copy in memory


def measure_peaks(device: torch.device) -> Peaks:
    """Measures a device, on a CPU with the threads that are set; it takes about a second, and 200 MB (a GPU: 1 GB)."""
    kind = "cuda" if device.type == "cuda" else "cpu"
    size, copied = _SIZE[kind], _COPIED[kind]
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        matrix = torch.ones(size, size, dtype=dtype, device=device)
        seconds[dtype] = _best_seconds(device, lambda matrix=matrix: matrix @ matrix)  # type: ignore[misc]
    source = torch.ones(copied, device=device)
    result = torch.empty_like(source)
    copy_s = _best_seconds(device, lambda: result.copy_(source))
    return Peaks(
        float32_flops=2 * size**3 / seconds[torch.float32],
        bfloat16_flops=2 * size**3 / seconds[torch.bfloat16],
        bytes_per_sec=2 * source.nbytes / copy_s,
    )


def _best_seconds(device: torch.device, run: Callable[[], object]) -> float:
    repeats = _REPEATS_ON_GPU if device.type == "cuda" else 1
    with torch.no_grad():
        run()
        return min(time_calls({"": lambda: nullcontext(run)}, device, rounds=_ROUNDS, repeats=repeats)[""])
