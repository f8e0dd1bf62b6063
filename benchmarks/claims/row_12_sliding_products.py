"""Sliding-window products by a strided view and one batched product: a (10, 20), b (20, 1000), window 20.

Claimed: far faster than the loop
Holds: one call does what a thousand small ones do; and as all the products are windows of one, a @ b, `sliding_matmul`
    does a twentieth of the work
Holds when: not in every library a call costs more than the product of a window; as all the products are windows of one,
    a @ b, `sliding_matmul` does a twentieth of the work
No longer holds: the calls of the loop cost next to nothing here; as all the products are windows of one, a @ b,
    `sliding_matmul` does a twentieth of the work
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from lightning_accel.claims.claim import Figure, Target, claim_in
from lightning_accel.claims.measure import device, speedup, timed_ms
from lightning_accel.ops import sliding_matmul, windows

CLAIM = claim_in(__doc__, row=12)

M, K, T, WINDOW = 10, 20, 1000, 20


def measure() -> Iterator[Figure]:
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((M, K), (K, T)))
    yield from figures("torch", torch.from_numpy(a).to(device()), torch.from_numpy(b).to(device()))
    yield from figures("NumPy", a, b)


def figures(library: str, a: Any, b: Any) -> Iterator[Figure]:
    """Three ways to the same products, with arrays of one library."""
    times = timed_ms(ways(a, b), seconds=1.5)
    loop, batched, ours = (times[way] for way in ("loop", "batched", "ours"))
    yield speedup(f"the library is {library}: batched, to the loop", loop, batched, Target("more than", 1))
    yield speedup(f"`sliding_matmul` in {library}, to the loop", loop, ours)
    yield speedup(f"`sliding_matmul` in {library}, to the batched product", batched, ours)


def ways(a: Any, b: Any) -> dict[str, Callable[[], Any]]:
    """Each gives the products ``(num_windows, M, WINDOW)``; the loop, a list of them."""
    return {
        "loop": lambda: [a @ b[:, start : start + WINDOW] for start in range(b.shape[1] - WINDOW + 1)],
        "batched": lambda: a @ windows(b, WINDOW).swapaxes(0, 1),
        "ours": lambda: sliding_matmul(a, b, WINDOW),
    }
