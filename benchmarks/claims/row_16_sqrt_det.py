"""√det of a covariance through Cholesky.

Claimed: 80.8 µs to 11.6 µs for 4x4
Holds: `det` goes through LU, which is twice the arithmetic of Cholesky
Holds when: Cholesky is half the arithmetic of LU, which `det` goes through
No longer holds: `det` goes through LU, twice the arithmetic of Cholesky, but it is no longer slow to call; and where
    the arithmetic counts, libraries may do LU better: all figures say where

Measured over sizes, one at a time and 32 at once; and where LU wins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from lightning_accel.claims.claim import Figure, Target, claim_in
from lightning_accel.claims.measure import device, speedup, timed_ms
from lightning_accel.ops import gaussian

CLAIM = claim_in(__doc__, row=16)
SIZES, BATCHES = (4, 16, 64, 256, 512), ((), (32,))
SECONDS = 0.6


def measure() -> Iterator[Figure]:
    for batch in BATCHES:
        for size in SIZES:
            name = f"{'32 times' if batch else 'one'} {size}x{size}"
            times = timed_ms(sides(covariances(*batch, size)), seconds=SECONDS)
            target = Target("at least", 80.8 / 11.6) if name == "one 4x4" else None
            through_cholesky = speedup(name, times["det"], times["Cholesky"], target)
            winner = "LU wins, " if through_cholesky.high < 1 else ""
            yield replace(through_cholesky, note=winner + through_cholesky.note)
            yield speedup(f"{name}, by gaussian.sqrt_det with its checks", times["det"], times["sqrt_det"])


def sides(cov: Tensor) -> dict[str, Callable[[], Tensor]]:
    return {
        "det": lambda: torch.linalg.det(cov).sqrt(),
        "Cholesky": lambda: torch.linalg.cholesky(cov).diagonal(dim1=-2, dim2=-1).prod(-1),
        "sqrt_det": lambda: gaussian.sqrt_det(cov),
    }


def covariances(*shape: int) -> Tensor:
    """Of a shape ``(..., D)``; float32, as estimated from 2 D samples."""
    samples = torch.randn(*shape, 2 * shape[-1], device=device())
    cov = samples @ samples.mT / samples.shape[-1]
    return cov.tril() + cov.tril(-1).mT
