"""A ReLU with a sparse result, against `relu(x).to_sparse()`, 4096².

Claimed: less memory
Holds: what is above zero is found in the input, piece by piece: beside the sparse result nothing is held but one piece
Holds when: the dense result is spared, which is not much beside the indices where little of it is zero
No longer holds: the pieces that are worked on take more than the dense result
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from lightning_accel.claims.claim import Figure, Target, claim_in, counted
from lightning_accel.claims.measure import device, peak_bytes, speedup, timed_ms
from lightning_accel.claims.row_14_sparse_conversion import DENSITIES, SIZE
from lightning_accel.ops import sparse_relu

CLAIM = claim_in(__doc__, row=15)


def measure() -> Iterator[Figure]:
    torch.manual_seed(0)
    normal = torch.distributions.Normal(0.0, 1.0)
    for share in DENSITIES:
        x = torch.randn(SIZE, SIZE, device=device()) + normal.icdf(torch.tensor(share)).item()
        sides: dict[str, Callable[[], Any]] = {
            "sparse": functools.partial(sparse_relu, x, layout="coo"),
            "sparse, CSR": functools.partial(sparse_relu, x, layout="csr"),
            "dense first": functools.partial(dense_first, x),
        }
        peaks = {name: peak_bytes(side) for name, side in sides.items()}
        note = " to ".join(f"{peaks[name] / 2**20:.3g} MiB" for name in ("dense first", "sparse"))
        condition = f"{share:.1%} of the input is above zero"
        ratio = peaks["dense first"] / peaks["sparse"]
        yield counted(condition, ratio, "x", Target("more than", 1), note)
        yield counted(f"as CSR, where {condition}", peaks["dense first"] / peaks["sparse, CSR"], "x")
        times = timed_ms(sides, seconds=0.7)
        yield speedup(f"in time, where {condition}", times["dense first"], times["sparse"])


def dense_first(x: Tensor) -> Tensor:
    return torch.relu(x).to_sparse()
