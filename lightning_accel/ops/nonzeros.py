"""Finds what is to be kept of a dense tensor, piece by piece: NumPy's loops on a CPU, torch's kernels elsewhere.

NumPy's ``flatnonzero`` takes less than a tenth of the time of ``torch.nonzero`` at half density, and where it does
worst, at a twentieth to a tenth, one thread of it takes as long as two of torch's. Two passes, so that the result is
allocated once and at its size: the first counts, the second writes.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from lightning_accel.ops.arrays import tensor_as_numpy

Kept = Literal["nonzero", "relu"]
"""What differs from zero; or of that what a ReLU lets pass, which is NaN too."""

WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of an element → the dtype that reads its bit pattern as a signed integer."""

Test = Callable[[Any], Any]
"""Elements → booleans, elementwise, written with operators that NumPy arrays and tensors share."""

# Elements. On a CPU what is worked on stays in the cache; on a GPU a kernel is to take longer than its launch.
_HOST_PIECE, _DEVICE_PIECE = 1 << 18, 1 << 22

_TESTS: dict[Kept, Test] = {"nonzero": lambda numbers: numbers != 0, "relu": lambda numbers: ~(numbers <= 0)}
_HALVES = (torch.float16, torch.bfloat16)
_MOST_NARROW = torch.iinfo(torch.int32).max


@dataclass(frozen=True, slots=True)
class Entries:
    """What was kept of a tensor, in the order of its rows."""

    indices: Tensor  # (D, nnz) by coordinates, one row a dimension; (1, nnz) by compressed rows, the columns
    values: Tensor  # (nnz,), of the tensor's dtype
    row_starts: Tensor | None = None  # (M + 1,) by compressed rows: where each begins, and where the last one ends


def count(x: Tensor, kept: Kept) -> int:
    """How many elements of ``x``, of any shape and strides, are to be kept. Waits for a GPU."""
    x = x.permute(sorted(range(x.dim()), key=x.stride, reverse=True))  # as it lies in memory: nothing to copy
    if x.is_cpu:
        test = _host_test(kept, x.dtype)
        return sum(int(np.count_nonzero(test(piece))) for piece in _pieces(_as_numpy(x), _HOST_PIECE))
    return sum(_device_counts(x, _TESTS[kept]))


def collect(x: Tensor, kept: Kept, *, compress_rows: bool, narrow: bool) -> Entries:
    """The elements to be kept, and where they are. On a GPU the host waits once, for their number.

    Beside the result no more is allocated than one piece and its positions take: on a CPU 0.5 to 12 MiB, by density.
    ``x``: (M, N) to compress rows, which is CSR rather than COO, else of any shape; any strides. ``narrow``: indices
    are int32 where every number fits, rather than int64.
    """
    nnz, found = (_host_found if x.is_cpu else _device_found)(x, kept)
    fits = max(nnz if compress_rows else 0, *x.shape, 0) <= _MOST_NARROW
    new_indices = functools.partial(torch.empty, dtype=torch.int32 if narrow and fits else torch.int64, device=x.device)
    entries = Entries(
        indices=new_indices((1 if compress_rows else x.dim(), nnz)),
        values=torch.empty(nnz, dtype=x.dtype, device=x.device),
        row_starts=new_indices(len(x) + 1).zero_() if compress_rows else None,
    )
    _write(entries, x.shape, found)
    return entries


def passes_relu(dtype: torch.dtype) -> Test:
    """The test, on bit patterns read as signed integers, for what a ReLU lets pass of a floating-point ``dtype``."""
    minus_infinity = word_of(float("-inf"), dtype)
    # From the lowest: -0.0 to -inf, negative NaNs, 0.0, what is above zero, positive NaNs.
    return lambda words: (words > minus_infinity) & (words != 0)


@functools.cache
def word_of(value: float, dtype: torch.dtype) -> int:
    """The bit pattern of a number, read as a signed integer."""
    return int(torch.tensor(value, dtype=dtype, device="cpu").view(WORDS[dtype.itemsize]).item())


def _write(entries: Entries, shape: torch.Size, found: Iterable[tuple[Any, Any]]) -> None:
    """Fills the entries with what was found, as (elements, positions among them) piece by piece."""
    is_host = entries.values.is_cpu
    as_array: Callable[[Tensor], Any] = _as_numpy if is_host else lambda tensor: tensor
    library: Any = np if is_host else torch
    device = {} if is_host else {"device": entries.values.device}
    indices, values = as_array(entries.indices), as_array(entries.values)
    row_starts = None if entries.row_starts is None else as_array(entries.row_starts)
    begin = first = 0
    for piece, positions in found:
        last = first + len(positions)
        values[first:last] = piece[positions]
        if row_starts is not None:
            # Of the rows that end in this piece: how many entries there are up to their ends.
            width = shape[1]
            row, next_row = begin // width + 1, (begin + len(piece)) // width + 1
            ends = library.arange(row * width - begin, next_row * width - begin, width, **device)
            row_starts[row:next_row] = library.searchsorted(positions, ends) + first
        positions += begin
        for dim in range(-1, -len(shape), -1):
            above = positions // shape[dim]
            indices[dim, first:last] = positions - above * shape[dim]
            positions = above
        if row_starts is None and len(shape) > 0:
            indices[0, first:last] = positions
        begin, first = begin + len(piece), last


def _pieces(x: Any, size: int) -> Iterator[Any]:
    """The elements in the order of rows, up to ``size`` at a time; copied where they do not lie in that order."""
    if 0 in x.shape:
        return
    if x.flags.c_contiguous if isinstance(x, np.ndarray) else x.is_contiguous():
        x = x.reshape(-1)
    row_size = math.prod(x.shape[1:])
    if row_size > size:
        for row in x:
            yield from _pieces(row, size)
    else:
        rows = size // row_size
        for start in range(0, len(x), rows):
            yield x[start : start + rows].reshape(-1)


# -- NumPy -----------------------------------------------------------------------------------------------------------


def _host_found(x: Tensor, kept: Kept) -> tuple[int, Iterator[tuple[Any, Any]]]:
    """How many there are, and the pieces with the positions in them."""
    array, test = _as_numpy(x), _host_test(kept, x.dtype)
    known: Iterable[Any]
    # What is not contiguous is counted in another order.
    nnz, known = _first_pass(array, test) if x.is_contiguous() else (count(x, kept), itertools.repeat(None))
    pieces = zip(_pieces(array, _HOST_PIECE), known, strict=False)
    return nnz, ((piece, np.flatnonzero(test(piece)) if at is None else at) for piece, at in pieces)


def _first_pass(array: Any, test: Test) -> tuple[int, list[Any]]:
    """How many there are, and in each piece where, or None; where they are few, they need not be looked for twice."""
    nnz, room = 0, _HOST_PIECE
    known = []
    for piece in _pieces(array, _HOST_PIECE):
        mask = test(piece)
        here = int(np.count_nonzero(mask))
        fits = here <= room
        known.append(np.flatnonzero(mask) if fits else None)
        nnz, room = nnz + here, room - here * fits
    return nnz, known


def _host_test(kept: Kept, dtype: torch.dtype) -> Test:
    if dtype not in _HALVES:
        return _TESTS[kept]
    return passes_relu(dtype) if kept == "relu" else lambda words: words << 1 != 0  # but for the sign


def _as_numpy(x: Tensor) -> Any:
    """The same memory; halves as integers: NumPy has no bfloat16, and compares float16 one by one."""
    return tensor_as_numpy(x.view(torch.int16) if x.dtype in _HALVES else x)


# -- torch -----------------------------------------------------------------------------------------------------------


def _device_found(x: Tensor, kept: Kept) -> tuple[int, Iterator[tuple[Tensor, Tensor]]]:
    """How many there are, and the pieces with the positions in them."""
    test = _TESTS[kept]
    counts = _device_counts(x, test)
    pieces = zip(_pieces(x, _DEVICE_PIECE), counts, strict=True)
    return sum(counts), ((piece, torch.nonzero_static(test(piece), size=here).view(-1)) for piece, here in pieces)


def _device_counts(x: Tensor, test: Test) -> list[int]:
    """How many in every piece: the one place that waits for the device."""
    counts = [test(piece).sum() for piece in _pieces(x, _DEVICE_PIECE)]
    return [int(here) for here in torch.stack(counts).tolist()] if counts else []
