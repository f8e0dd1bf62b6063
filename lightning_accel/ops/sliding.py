"""Sliding windows, matrix products of sliding windows, and many matrix products at once."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

from lightning_accel.ops.arrays import ArrayT, as_tensors, common_library, library_of

Pair: TypeAlias = tuple[Any, Any]

# Device → (fewest pairs, most elements of a matrix) for which a group is stacked. Stacking copies, and grouping takes
# half a microsecond per pair. On a CPU with two cores, forward and backward together were 1.05 to 1.6 times as fast as
# a loop (forward alone 0.5 to 1.3 times) for 16 to 256 pairs of up to 64x64; at 128x128 one product keeps the cores
# busy. On a GPU a launch takes a few microseconds, in which the GPU computes 512x512: an estimate, not measured.
_STACKED = {"cpu": (16, 64 * 64), "cuda": (4, 512 * 512)}
_SIDE_STREAMS = 4
_CAST = {torch.float16, torch.bfloat16, torch.float32}  # autocast converts these


def windows(x: ArrayT, size: int, step: int = 1, axis: int = -1) -> ArrayT:
    """Returns all windows of ``size`` along an axis, as a view: nothing is copied, for any dtype and strides.

    Windows overlap if ``step`` is smaller than ``size``: a write into one changes others. NumPy's view is read-only.
    CuPy and torch have no read-only views, so the caller must not write.

    Args:
        x: Of NumPy, CuPy or torch.
        size: Elements in a window.
        step: From the beginning of a window to that of the next. Elements after the last whole window are left out.
        axis: The axis along which windows slide.

    Returns:
        The shape of ``x`` with the number of windows in place of the axis, and an additional last axis of ``size``, as
            in :meth:`torch.Tensor.unfold`. Tensors keep their gradients.

    Raises:
        TypeError: ``x`` is not an array; a number is not an integer.
        ValueError: ``size`` is less than 1 or more than the axis's length, ``step`` is less than 1, or the axis does
            not exist.
    """
    library = common_library("windows", {"x": x})
    array: Any = x
    if isinstance(array, Tensor) and array.layout != torch.strided:
        raise TypeError(
            f"windows(x=...) has layout {array.layout}, which has no views. Give a dense tensor: x.to_dense()."
        )
    if array.ndim == 0:
        raise ValueError("windows(x=...) has no axes. Allowed: one dimension or more.")
    axis = _integer("windows", "axis", axis)
    if not -array.ndim <= axis < array.ndim:
        raise ValueError(
            f"windows(axis={axis}): the shape {tuple(array.shape)} has {array.ndim} axes. Allowed: from -{array.ndim}"
            f" up to {array.ndim - 1}."
        )
    size = _checked_size("windows", "size", size, array.shape, axis % array.ndim)
    step = _integer("windows", "step", step)
    if step < 1:
        raise ValueError(f"windows(step={step}) of an axis of length {array.shape[axis]}. Allowed: 1 or more.")
    # A larger step gives one window too, but may overflow a stride.
    return cast(ArrayT, _unfolded(library, array, axis % array.ndim, size, min(step, array.shape[axis])))


def sliding_matmul(a: ArrayT, b: ArrayT, window: int, *, materialize: bool = False) -> ArrayT:
    """Returns all products ``a @ b[..., i:i + window]``.

    They are windows of ``a @ b``: that product is computed once, and the result is a view of it. It takes as much
    memory as the product, ``(..., M, T)``. Separate products would take about ``window`` times as much.

    Args:
        a: ``(..., M, K)``; the leading dimensions broadcast with those of ``b``. Floating point, complex numbers, and
            integers, which wrap around, except tensors on a GPU. Each library multiplies its own arrays.
        b: ``(..., K, T)``, of the same library and dtype. Under ``torch.autocast``, tensors may differ in dtype.
        window: Columns of ``b`` in each product, 1 to ``T``.
        materialize: Whether to copy the view into memory that may be written to: ``window`` times as much.

    Returns:
        ``(..., num_windows, M, window)`` with ``num_windows = T - window + 1``, of the inputs' library. NumPy's view is
            read-only; writing to those of CuPy and torch would change other windows. Tensors keep their gradients.

    Raises:
        TypeError: The arrays are of several libraries or dtypes, or of a dtype without a product there.
        ValueError: The inner dimensions differ, the leading ones cannot be broadcast, or the window does not fit.
    """
    asker = "sliding_matmul"
    library = common_library(asker, {"a": a, "b": b})
    _check_product(asker, a, b)
    window = _checked_size(asker, "window", window, b.shape, -1)  # type: ignore[attr-defined]
    product = _product(asker, a, b)
    products: Any = _unfolded(library, product, product.ndim - 1, window, 1).swapaxes(-3, -2)
    if materialize:
        products = products.contiguous() if library == "torch" else products.copy()
    return cast(ArrayT, products)


def batched_matmul(pairs: Iterable[tuple[ArrayT, ArrayT]]) -> list[ArrayT]:
    """Returns the products ``a @ b`` of many pairs, computed in fewer and larger calls.

    Pairs with the same shapes, dtype and device form a group. A group of many small matrices is stacked into one
    batched product; others are multiplied one by one. On a GPU, groups run in parallel on separate streams, and the
    current stream waits for all of them. This helps with gradients and on GPUs. On a CPU, a loop over tensors without
    gradients is about as fast (figures at the top of the file), and NumPy arrays use a loop.

    Args:
        pairs: ``(a, b)`` with ``a`` of ``(..., M, K)`` and ``b`` of ``(..., K, N)``, in one dtype, as for
            :func:`sliding_matmul`; all of one library. CuPy arrays are multiplied by torch, all on one device.

    Returns:
        The products ``(..., M, N)`` in the order of the pairs. Those of a stack are views of one batch: each keeps the
            whole batch alive, and none can be written to while gradients are recorded. Tensors keep their gradients; if
            some products of a stack are not used, their inputs get gradients of zeros instead of None.

    Raises:
        TypeError: As in :func:`sliding_matmul`, with the index of the pair.
        ValueError: Likewise; or the arrays of a pair are on several devices.
    """
    listed: list[Pair] = []
    for index, pair in enumerate(pairs):
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise TypeError(f"batched_matmul(pairs): pairs[{index}] is no pair. Give (a, b) for each product.")
        listed.append((pair[0], pair[1]))
    libraries = {library_of(array) for array in itertools.chain.from_iterable(listed)}
    if libraries <= {"torch"}:
        return _products(listed)
    if libraries == {"NumPy"}:
        _grouped(listed)
        return [a @ b for a, b in listed]
    named = {f"pairs[{index}][{place}]": array for index, pair in enumerate(listed) for place, array in enumerate(pair)}
    tensors, back = as_tensors("batched_matmul", **named)
    with torch.autocast(tensors[0].device.type, enabled=False):
        products = _products(list(zip(tensors[::2], tensors[1::2], strict=True)))
    return [back(product) for product in products]


def _unfolded(library: str, array: Any, axis: int, size: int, step: int) -> Any:
    if library == "torch":
        return array.unfold(axis, size, step)
    stride = array.strides[axis]
    count = (array.shape[axis] - size) // step + 1
    shape = (*array.shape[:axis], count, *array.shape[axis + 1 :], size)
    strides = (*array.strides[:axis], stride * step, *array.strides[axis + 1 :], stride)
    if library == "NumPy":
        return np.lib.stride_tricks.as_strided(array, shape, strides, writeable=False)
    from cupy.lib.stride_tricks import as_strided

    return as_strided(array, shape, strides)


def _products(pairs: Sequence[Pair]) -> list[Any]:
    groups = _grouped(pairs)
    found: dict[int, Tensor] = {}
    sides = []
    try:
        for number, indices in enumerate(groups):
            group = [pairs[index] for index in indices]
            device = group[0][0].device
            if device.type == "cuda" and len(groups) > 1:
                sides.append(_side_streams(device)[number % _SIDE_STREAMS])
                products = _on_stream(sides[-1], group)
            else:
                products = _products_of_group(group)
            found.update(zip(indices, products, strict=True))
    finally:
        for side in sides:
            torch.cuda.current_stream(side.device).wait_stream(side)
    return [found[index] for index in range(len(pairs))]


def _grouped(pairs: Sequence[Pair]) -> list[list[int]]:
    """Returns the indices of equal kinds of pairs, in order of first occurrence. Checks each kind."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for index, (a, b) in enumerate(pairs):
        key = (a.shape, b.shape, a.dtype, b.dtype, *_tensor_traits(a), *_tensor_traits(b))
        if key not in groups:
            _check_product(f"batched_matmul, pairs[{index}]", a, b)
            groups[key] = []
        groups[key].append(index)
    return list(groups.values())


def _tensor_traits(array: Any) -> tuple[Any, ...]:
    """Returns what else tensors of a stack must share: otherwise a constant would get a gradient."""
    return (array.device, array.layout, array.requires_grad) if isinstance(array, Tensor) else ()


def _on_stream(side: torch.cuda.Stream, group: Sequence[Pair]) -> Sequence[Tensor]:
    current = torch.cuda.current_stream(side.device)
    side.wait_stream(current)
    with torch.cuda.stream(side):
        products = _products_of_group(group)
    # The backward pass reads the inputs on the side stream again. Their memory must not be reused before that.
    for tensor in itertools.chain.from_iterable(group):
        tensor.record_stream(side)
    for product in products:
        product.record_stream(current)
    return products


@functools.cache
def _side_streams(device: torch.device) -> tuple[torch.cuda.Stream, ...]:
    """Returns the same streams at every call: memory of one stream is not reused by another."""
    return tuple(torch.cuda.Stream(device) for _ in range(_SIDE_STREAMS))  # type: ignore[no-untyped-call]


def _products_of_group(group: Sequence[Pair]) -> Sequence[Any]:
    a, b = group[0]
    least_pairs, most_elements = _STACKED.get(a.device.type, (math.inf, 0))
    is_stacked = len(group) >= least_pairs and max(a.numel(), b.numel()) <= most_elements
    # With different numbers of dimensions, the new first one would broadcast against the wrong one.
    if not is_stacked or a.ndim != b.ndim or not a.layout == b.layout == torch.strided:
        return [_product("batched_matmul", a, b) for a, b in group]
    stacks = [torch.stack(matrices) for matrices in zip(*group, strict=True)]
    return tuple(_product("batched_matmul", *stacks).unbind())


def _product(asker: str, a: Any, b: Any) -> Any:
    try:
        return a @ b
    except NotImplementedError as error:
        raise TypeError(
            f"{asker}: torch has no product of {a.dtype} on {a.device.type} ({error}). Allowed: floating point and"
            " complex numbers, on a CPU integers too."
        ) from error


def _check_product(asker: str, a: Any, b: Any) -> None:
    """Checks that ``a`` and ``b``, of one library, can be multiplied."""
    leading = zip(reversed(a.shape[:-2]), reversed(b.shape[:-2]), strict=False)
    can_broadcast = all(m == n or 1 in (m, n) for m, n in leading)
    if a.ndim < 2 or b.ndim < 2 or a.shape[-1] != b.shape[-2] or not can_broadcast:
        raise ValueError(
            f"{asker}: no product of a of shape {tuple(a.shape)} and b of shape {tuple(b.shape)}. Allowed: (..., M, K)"
            " and (..., K, T), with leading dimensions that can be broadcast."
        )
    if getattr(a, "device", None) != getattr(b, "device", None):  # NumPy arrays before version 2 have none
        raise ValueError(f"{asker}: a on {a.device}, b on {b.device}. Move them to one device.")
    if a.dtype != b.dtype:
        is_cast = isinstance(a, Tensor) and {a.dtype, b.dtype} <= _CAST and torch.is_autocast_enabled(a.device.type)
        if not is_cast:
            raise TypeError(f"{asker}: a of {a.dtype}, b of {b.dtype}. Convert one: a product has one dtype.")
    if a.dtype == (torch.bool if isinstance(a, Tensor) else bool):
        raise TypeError(f"{asker}: a and b hold booleans. Convert them, to integers to count, say.")


def _checked_size(asker: str, name: str, value: int, shape: Sequence[int], axis: int) -> int:
    size, length = _integer(asker, name, value), shape[axis]
    if not 1 <= size <= length:
        raise ValueError(
            f"{asker}({name}={size}): axis {axis} of shape {tuple(shape)} has length {length}. Allowed: 1 up to that"
            " length."
        )
    return size


def _integer(asker: str, name: str, value: Any) -> int:
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise TypeError(f"{asker}({name}={value!r}) is of type {type(value).__name__}. Allowed: an integer.")
