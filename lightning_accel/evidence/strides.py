"""Which strides products and convolutions compute with as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_accel.core.layout import FORMATS

_CONVOLVING = frozenset({"convolution", "convolution_backward"})
_MATRICES = frozenset({"mm", "addmm", "bmm", "baddbmm"})


def odd_operand(operation: Any, read: Sequence[Tensor]) -> Tensor | None:
    """The first of the tensors that a product or a convolution has to copy, or is slower on; None: there is none.

    Convolutions want what is dense in a memory format, products of matrices what BLAS has a leading dimension for,
    transposed or not.
    """
    name = getattr(getattr(operation, "overloadpacket", operation), "__name__", "")
    if any(one.layout is not torch.strided for one in read):
        return None
    if name in _CONVOLVING:
        return next((one for one in read if not _is_in_a_format(one)), None)
    return next((one for one in read if not _is_matrix(one)), None) if name in _MATRICES else None


def _is_in_a_format(tensor: Tensor) -> bool:
    memory_format = FORMATS.get(tensor.dim(), torch.contiguous_format)
    return tensor.is_contiguous() or tensor.is_contiguous(memory_format=memory_format)


def _is_matrix(tensor: Tensor) -> bool:
    if tensor.dim() < 2:
        return True  # a bias
    (rows, columns), (down, across) = tensor.shape[-2:], tensor.stride()[-2:]
    by_rows = (across == 1 or columns == 1) and (down >= columns or rows == 1)
    by_columns = (down == 1 or rows == 1) and (across >= rows or columns == 1)
    return by_rows or by_columns


def strides_that_matter(tensor: Tensor) -> list[int]:
    """Of the dimensions that have several elements: those of others say nothing."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
