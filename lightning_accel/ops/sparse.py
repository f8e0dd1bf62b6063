"""Converts dense arrays to sparse ones, CSR and COO, piece by piece: little more than the result is allocated.

Elements equal to zero are left out, negative zero too; NaN is kept. The result is of the input's library:
``torch.sparse_csr`` and coalesced ``torch.sparse_coo`` tensors, SciPy's ``csr_array`` and ``coo_array`` for NumPy,
``csr_matrix`` and ``coo_matrix`` of ``cupyx.scipy.sparse`` for CuPy.
"""

from __future__ import annotations

import functools
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from lightning_accel.core.hidden_warnings import hidden_warnings
from lightning_accel.ops.arrays import as_tensors, common_library, plain
from lightning_accel.ops.nonzeros import Entries, Kept, collect, count

Layout = Literal["csr", "coo"]

_REAL = frozenset((torch.float32, torch.float64))
_COMPLEX = frozenset((torch.complex64, torch.complex128))
_INTEGERS = frozenset((torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64))
_SPARSE_DTYPES = {
    "torch": _REAL | _COMPLEX | _INTEGERS | {torch.bool, torch.float16, torch.bfloat16},
    "NumPy": _REAL | _COMPLEX | _INTEGERS | {torch.bool, torch.uint16, torch.uint32, torch.uint64},
    "CuPy": _REAL | _COMPLEX | {torch.bool},
}
"""Library → dtypes that its sparse arrays can hold and compute with."""

_COO_DIMS = {"torch": (0, 64), "NumPy": (1, 64), "CuPy": (2, 2)}


def to_csr(x: Any) -> Any:
    """Converts an array to compressed sparse rows.

    Tensors keep their gradient, which is that of torch's ``to_sparse_csr()``. Peak memory is the input, the result and
    one piece. On a GPU the host waits once, for the number of values.

    Args:
        x: (M, N), dense, of NumPy, CuPy or torch.

    Returns:
        (M, N), of the same dtype. Indices are int64 for torch, otherwise int32 if they fit.

    Raises:
        TypeError: ``x`` is not an array, is sparse already, or has a dtype that its library's sparse arrays lack.
        ValueError: ``x`` has a number of dimensions that its library's sparse arrays do not support.
        ImportError: ``x`` is a NumPy array and SciPy is not installed.
    """
    return _convert("to_csr", x, "csr", "nonzero")


def to_coo(x: Any) -> Any:
    """Converts an array to coordinates and values, in row order. All else is as in :func:`to_csr`.

    Args:
        x: Dense, of NumPy, CuPy or torch. Any number of dimensions for torch, two for CuPy. For NumPy it depends on
            SciPy: two, since version 1.13 also one, since 1.15 more.

    Returns:
        An array with the shape and dtype of ``x``.
    """
    return _convert("to_coo", x, "coo", "nonzero")


def sparse_relu(x: Any, layout: Layout = "csr") -> Any:
    """Returns ``relu(x)`` as a sparse array, without building the dense one.

    As with ``torch.relu``, NaN is kept, and gradients pass where the result is not zero.

    Args:
        x: As for :func:`to_csr` or :func:`to_coo`. Complex and boolean arrays raise a ``TypeError``.
        layout: ``"csr"`` or ``"coo"``. Anything else raises a ``ValueError``.
    """
    if layout not in get_args(Layout):
        raise ValueError(f"sparse_relu(layout={layout!r}). Allowed: 'csr', 'coo'.")
    return _convert("sparse_relu", x, layout, "relu")


def density(x: Any) -> float:
    """Returns the share of nonzero elements in a dense array, from 0 to 1; 0 for an empty array.

    Waits for a GPU. Raises a ``TypeError`` if ``x`` is not an array of NumPy, CuPy or torch, or is sparse.
    """
    (tensor,), _ = as_tensors("density", x=x)
    _check_dense("density", tensor)
    return count(plain(tensor), "nonzero") / max(tensor.numel(), 1)


def _convert(asker: str, x: Any, layout: Layout, kept: Kept) -> Any:
    library = common_library(asker, {"x": x})
    (tensor,), back = as_tensors(asker, x=x)
    _check(asker, tensor, layout, library, kept)
    if library == "torch":
        return _Sparse.apply(tensor, layout, kept)  # type: ignore[no-untyped-call]
    make = _maker(asker, library, layout)
    entries = collect(tensor, kept, compress_rows=layout == "csr", narrow=True)
    if library == "CuPy" and entries.indices.dtype != torch.int32:
        # CuPy would accept the indices and truncate them.
        raise ValueError(
            f"{asker}(x=...) has shape {tuple(tensor.shape)} and {len(entries.values)} values. CuPy's indices have 32"
            " bits: convert it in parts, or as a tensor (torch.from_dlpack)."
        )
    values, indices = back(entries.values), tuple(back(index) for index in entries.indices)
    parts = (values, indices) if entries.row_starts is None else (values, *indices, back(entries.row_starts))
    made = make(parts, shape=tuple(tensor.shape))
    made.has_canonical_format = True  # otherwise found by checking every index
    return made


def _maker(asker: str, library: str, layout: Layout) -> Any:
    """Returns the sparse array class of SciPy or CuPy."""
    if library == "CuPy":
        from cupyx.scipy import sparse

        return sparse.csr_matrix if layout == "csr" else sparse.coo_matrix
    try:
        from scipy import sparse
    except ImportError as error:
        raise ImportError(f"{asker}(x=...) makes SciPy arrays of NumPy's. Install SciPy: pip install scipy") from error
    return sparse.csr_array if layout == "csr" else sparse.coo_array


def _check(asker: str, x: Tensor, layout: Layout, library: str, kept: Kept) -> None:
    _check_dense(asker, x)
    least, most = (2, 2) if layout == "csr" else _COO_DIMS[library]
    if not least <= x.dim() <= most:
        others = " Layout COO, of tensors, takes any number." if most == 2 else ""
        raise ValueError(
            f"{asker}(x=...) has shape {tuple(x.shape)}. Layout {layout.upper()} of {library} takes"
            f" {'two dimensions' if most == 2 else 'at least one dimension'}.{others}"
        )
    allowed = _SPARSE_DTYPES[library]
    if kept == "relu":
        allowed = allowed - _COMPLEX - {torch.bool}
    if x.dtype not in allowed:
        found, *names = (str(dtype).removeprefix("torch.") for dtype in (x.dtype, *allowed))
        raise TypeError(f"{asker}(x=...) holds {found}. Allowed for arrays of {library}: {', '.join(sorted(names))}.")


def _check_dense(asker: str, x: Tensor) -> None:
    if x.layout != torch.strided:
        raise TypeError(f"{asker}(x=...) has layout {x.layout}. Give a dense tensor: x.to_dense().")


class _Sparse(torch.autograd.Function):
    """Converts a dense tensor to a sparse one.

    The gradient may have any layout and is passed on dense: unchanged for a conversion, as after torch's own; for a
    ReLU, only where elements were kept. Both are linear in the gradient, so that it can be differentiated again.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: Layout, kept: Kept) -> Tensor:
        # Only lazily conjugated or negated views are copied, since their memory does not hold their values.
        entries = collect(plain(x), kept, compress_rows=layout == "csr", narrow=False)
        ctx.shape, ctx.is_relu = x.shape, kept == "relu"
        if ctx.is_relu:
            ctx.save_for_backward(entries.indices, entries.row_starts)
        return _sparse_tensor(entries, x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        dense = grad if grad.layout == torch.strided else grad.to_dense()
        if ctx.is_relu:
            indices, row_starts = ctx.saved_tensors
            ones = torch.ones(indices.shape[1], dtype=torch.bool, device=indices.device)
            kept = _sparse_tensor(Entries(indices, ones, row_starts), ctx.shape).to_dense()
            dense = torch.where(kept, dense, 0)
        return dense, None, None


def _sparse_tensor(entries: Entries, shape: torch.Size) -> Tensor:
    indices, values, row_starts = entries.indices, entries.values, entries.row_starts
    common: dict[str, Any] = {"size": shape, "device": values.device, "check_invariants": False}
    if row_starts is None:
        return torch.sparse_coo_tensor(indices, values, is_coalesced=True, **common)
    _hear_of_beta()
    return torch.sparse_csr_tensor(row_starts, indices[0], values, **common)


@functools.cache
def _hear_of_beta() -> None:
    """Creates a first CSR tensor, once per process, to consume torch's warning that these are in beta.

    Torch 2.11 also warns that invariants are not checked, although that was requested.
    """
    with hidden_warnings("Sparse (CSR tensor support is in beta|invariant checks are implicitly disabled)"):
        start = torch.zeros(1, dtype=torch.int64, device="cpu")
        torch.sparse_csr_tensor(start, start[:0], start[:0], (0, 0), device="cpu", check_invariants=False)
