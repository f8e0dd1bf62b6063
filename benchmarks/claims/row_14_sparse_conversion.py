"""Dense → CSR as fast and as lean as dense → COO, 4096²; both of this project, with torch's own beside them.

Claimed: equal time, flat memory
Holds: both read the array piece by piece and write their result once; CSR has one index less a value, and counting
    where rows end takes next to no time
Holds when: reading the array takes the same for both; what CSR adds, the ends of the rows, and what it saves, one index
    a value, weigh differently by density
No longer holds: counting where rows end takes longer here than writing one index more a value
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from lightning_accel.claims.claim import Figure, Target, claim_in, counted
from lightning_accel.claims.measure import device, peak_bytes, speedup, timed_ms
from lightning_accel.ops import to_coo, to_csr

CLAIM = claim_in(__doc__, row=14)

SIZE = 4096
DENSITIES = (0.5, 0.1, 0.01, 0.001)

_AS_FAST, _AS_LEAN = Target("at least", 1), Target("at most", 1)


def measure() -> Iterator[Figure]:
    torch.manual_seed(0)
    for share in DENSITIES:
        x = torch.randn(SIZE, SIZE, device=device())
        x *= torch.rand_like(x) < share
        sides: dict[str, Callable[[], Any]] = {
            "csr": functools.partial(to_csr, x),
            "coo": functools.partial(to_coo, x),
            "torch's csr": x.to_sparse_csr,
            "torch's coo": x.to_sparse,
        }
        times = timed_ms(sides, seconds=1)
        yield speedup(f"time, density {share:.1%}", times["coo"], times["csr"], _AS_FAST)
        yield speedup(f"time against torch's own COO, density {share:.1%}", times["torch's coo"], times["csr"])
        yield speedup(
            f"time of torch's own CSR against its COO, density {share:.1%}", times["torch's coo"], times["torch's csr"]
        )
        peaks = {name: peak_bytes(side) for name, side in sides.items()}
        note = " to ".join(f"{peaks[name] / 2**20:.3g} MiB" for name in ("coo", "csr"))
        yield counted(f"memory, density {share:.1%}", peaks["csr"] / peaks["coo"], "x", _AS_LEAN, note)
        yield counted(f"memory against torch's own COO, density {share:.1%}", peaks["csr"] / peaks["torch's coo"], "x")
        beyond = (peaks["csr"] - result_bytes(to_csr(x))) / x.nbytes
        yield counted(
            f"CSR's memory beyond input and result, as a share of the input, density {share:.1%}", beyond, "%"
        )


def result_bytes(x: Tensor) -> int:
    """Bytes of the indices and values of a CSR tensor."""
    return x.crow_indices().nbytes + x.col_indices().nbytes + x.values().nbytes
