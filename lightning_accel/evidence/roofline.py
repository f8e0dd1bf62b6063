"""What the operations of a step have to do, beside what they take, and the strides with which they compute.

Of many operations it is less than it costs to have them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_accel.core.layout import FORMATS
from lightning_accel.evidence.step_breakdown import LayoutCopy, ModuleCost, OperationsAlike

COPYING = frozenset({"clone", "copy_", "to_copy"})
"""Operations that change nothing but where and how a tensor lies."""


@dataclass
class Operation:
    """One operation of a step."""

    cost: ModuleCost  # of its module
    began: Any = None  # as its clock has it; likewise `ended`
    ended: Any = None
    is_backward: bool = False
    is_low_precision: bool = False
    growing_bytes: int = 0  # that it moves of tensors that grow with the batch
    copy: LayoutCopy | None = None  # that it is
    flops: int = 0  # its own; 0: it is no product
    ms: float = 0.0  # what it took, once that is known


def weight_shapes(model: nn.Module) -> set[tuple[int, ...]]:
    """The shapes of a model's weights, and of these transposed."""
    shapes = [tuple(p.shape) for p in model.parameters() if not nn.parameter.is_lazy(p)]
    return {*shapes, *(shape[::-1] for shape in shapes)}


def is_of_weight(name: str, written: Sequence[Tensor], weights: Collection[tuple[int, ...]]) -> bool:
    """Whether an operation only copies a weight or its gradient, which do not grow with the batch."""
    return name in COPYING and any(tuple(tensor.shape) in weights for tensor in written)


def alike(operations: Iterable[Operation]) -> list[OperationsAlike]:
    """Those that have about as much to do, together."""
    found: defaultdict[tuple[int, int], OperationsAlike] = defaultdict(OperationsAlike)
    for one in operations:
        # A product of few samples reads weights, whatever their number.
        moved_bytes = 0 if one.flops else one.growing_bytes
        some = found[one.flops.bit_length(), moved_bytes.bit_length()]
        some.count += 1
        some.ms += one.ms
        some.flops += one.flops
        some.low_precision_flops += one.flops if one.is_low_precision else 0
        some.moved_bytes += moved_bytes
    return list(found.values())


def odd_operand(operation: Any, read: Sequence[Tensor]) -> Tensor | None:
    """The first of the tensors that a product or a convolution has to copy, or is slower on; None: there is none.

    Convolutions want what is dense in a memory format, products of matrices what BLAS has a leading dimension for,
    transposed or not.
    """
    suits = _SUITS.get(getattr(getattr(operation, "overloadpacket", operation), "__name__", ""))
    if suits is None or any(one.layout is not torch.strided for one in read):
        return None
    return next((one for one in read if not suits(one)), None)


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


_SUITS: dict[str, Callable[[Tensor], bool]] = {
    **dict.fromkeys(("convolution", "convolution_backward"), _is_in_a_format),
    **dict.fromkeys(("mm", "addmm", "bmm", "baddbmm"), _is_matrix),
}
"""Operation → whether it computes with a tensor as it is."""


def strides_that_matter(tensor: Tensor) -> list[int]:
    """Of the dimensions that have several elements: those of others say nothing."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
