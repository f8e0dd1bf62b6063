"""CuPy for matrix preprocessing, a product of 10,000 x 10,000.

Claimed: 82x over NumPy; zero-copy both ways
Holds: the product is bound by arithmetic, of which this GPU does that many times more a second than the cores beside
    it; tensors and CuPy's arrays are the same memory
Holds when: tensors and CuPy's arrays can be the same memory whatever the speed, and how many times as fast the product
    is depends on the GPU and on how many cores NumPy has
No longer holds: the cores beside this GPU do too much of the same arithmetic a second, and memory was copied on the way
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from lightning_accel.claims.claim import Figure, NotHereError, Target, claim_in, counted
from lightning_accel.claims.measure import interleaved_ms, speedup
from lightning_accel.data import Map, Preprocess
from lightning_accel.data.tensor_arrays import why_no_cupy
from lightning_accel.ops.arrays import as_tensors

CLAIM = claim_in(__doc__, row=6)

SIZE = 10_000


def measure() -> Iterator[Figure]:
    if not torch.cuda.is_available():
        raise NotHereError("needs a CUDA device and CuPy")
    device = torch.device("cuda", torch.cuda.current_device())
    lacks = why_no_cupy(device)
    if lacks is not None:
        raise NotHereError(f"needs CuPy beside the GPU: {lacks}")
    yield from products(SIZE, device)
    yield counted(
        "zero-copy is asked for: arrays that lie elsewhere than their tensors",
        copied(device),
        "%",
        Target("at most", 0),
    )


def products(size: int, device: torch.device) -> Iterator[Figure]:
    """A transform that multiplies a float32 matrix by itself, by NumPy on the host and by CuPy on ``device``."""
    with_numpy, with_cupy = (Preprocess([Map(square)], device=where) for where in ("cpu", device))
    on_host = torch.randn(size, size)
    on_device = on_host.to(device)
    sides: dict[str, Callable[[], Tensor]] = {
        "NumPy": lambda: with_numpy(on_host),
        "CuPy": lambda: with_cupy(on_device),
        "CuPy, from the host and back": lambda: with_cupy(on_host.to(device)).cpu(),
    }
    square(None, on_host[:256, :256].numpy())  # threads and libraries are there
    sides["CuPy"]()
    # Few rounds: on few cores, NumPy takes half a minute for each.
    times = interleaved_ms(sides, rounds=3, warm_up=0)
    yield speedup(
        "speed is asked for, of a tensor on the device", times["NumPy"], times["CuPy"], Target("at least", 82)
    )
    both_ways = times["CuPy, from the host and back"]
    yield speedup("speed with both copies, of a tensor on the host", times["NumPy"], both_ways)


def square(xp: Any, matrix: Any) -> Any:
    return matrix @ matrix


def copied(device: torch.device) -> float:
    """Tensor → array → tensor, in a transform and out of it: the share of steps after which the memory is another."""
    tensor = torch.zeros(64, 64, device=device)
    seen = []

    def look(xp: Any, array: Any) -> Any:
        (again,), _ = as_tensors("claim 6", array=array)
        seen.append(again.data_ptr())
        return array[:]  # another object, or the tensor itself would be handed on

    returned = Preprocess([Map(look)], device=device)(tensor)
    seen.append(returned.data_ptr())
    return sum(pointer != tensor.data_ptr() for pointer in seen) / len(seen)
