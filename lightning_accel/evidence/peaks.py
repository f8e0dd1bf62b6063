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
_LEAST_SIZE = 256  # where products are slow: a CPU without bfloat16 takes four seconds for one of size 1024
_MOST_S = 0.25  # for the rounds of a size, and for one product of the next
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
    source = torch.ones(_COPIED[_kind(device)], device=device)
    result = torch.empty_like(source)
    copy_s = _best_seconds(device, lambda: result.copy_(source))
    return Peaks(
        float32_flops=_best_flops(device, torch.float32),
        bfloat16_flops=_best_flops(device, torch.bfloat16),
        bytes_per_sec=2 * source.nbytes / copy_s,
    )


def _best_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Multiplies larger and larger matrices, up to the size that is wanted or takes too long."""
    size = _LEAST_SIZE
    while True:
        matrix = torch.ones(size, size, dtype=dtype, device=device)
        product_s = _best_seconds(device, lambda matrix=matrix: matrix @ matrix)  # type: ignore[misc]
        if size == _SIZE[_kind(device)] or 8 * product_s > _MOST_S:
            return 2 * size**3 / product_s
        size *= 2


def _best_seconds(device: torch.device, run: Callable[[], object]) -> float:
    repeats = _REPEATS_ON_GPU if device.type == "cuda" else 1
    with torch.no_grad():
        run()
        calls = {"": lambda: nullcontext(run)}
        return min(time_calls(calls, device, rounds=_ROUNDS, most_s=_MOST_S, repeats=repeats)[""])


def _kind(device: torch.device) -> str:
    return "cuda" if device.type == "cuda" else "cpu"
