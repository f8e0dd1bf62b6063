"""Counts the samples in a batch, and splits a batch into parts."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from lightning_utilities.core.apply_func import is_namedtuple
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from lightning_accel.core.tree import changeable_argument, map_leaves, tensors_in


def count_samples(batch: Any) -> int:
    """Returns the length of the first dimension, which all tensors of the batch share. Scalars do not count.

    Raises:
        ValueError: The batch cannot be split. The message is the reason that completes "the batch cannot be split:".
    """
    unknown = changeable_argument(batch, {})
    if unknown is not None:
        raise ValueError(f"of the {unknown} in it no part can be taken")
    tensors = tensors_in(batch)
    if any(tensor.is_nested or tensor.layout is not torch.strided for tensor in tensors):
        raise ValueError("of the nested or sparse tensor in it no part is taken")
    lengths = sorted({len(tensor) for tensor in tensors if tensor.dim()})
    if not lengths:
        raise ValueError("no tensor in it has a dimension of samples")
    if len(lengths) > 1:
        raise ValueError(f"the first dimensions of its tensors differ: {', '.join(map(str, lengths))}")
    return lengths[0]


def split_samples(batch: Any, most: int) -> list[tuple[Any, int]]:
    """Splits the batch into parts of nearly equal size, at most ``most`` samples each. Returns each with its size.

    Tensors become views. Lists and tuples without tensors that are as long as the batch, such as captions, are split
    too. Everything else is in every part.

    Raises:
        ValueError: As :func:`count_samples`.
    """
    size = count_samples(batch)
    count = -(-size // most)
    sizes = [size // count + (index < size % count) for index in range(count)]  # the sizes of torch.tensor_split()
    begins = itertools.accumulate(sizes, initial=0)
    return [(_part(batch, begin, length, size), length) for begin, length in zip(begins, sizes, strict=False)]


def _part(batch: Any, begin: int, length: int, size: int) -> Any:
    def taken(data: Any) -> Any:
        if isinstance(data, Tensor):
            return data[begin : begin + length] if data.dim() else data
        if isinstance(data, PackedSequence):
            raise ValueError("of the PackedSequence in it no part can be taken")
        if is_namedtuple(data):
            return type(data)(*(map_leaves(taken, one, kinds) for one in data))
        if len(data) == size and data is not batch:
            if tensors_in(data):
                raise ValueError(f"a {type(data).__name__} of {size} tensors may have one for each sample")
            return data[begin : begin + length]
        return type(data)([map_leaves(taken, one, kinds) for one in data])

    kinds = (Tensor, list, tuple)
    part = map_leaves(taken, batch, kinds)
    if any(len(tensor) != length for tensor in tensors_in(part) if tensor.dim()):
        raise ValueError("a container in it is not known, or cannot be changed, as a frozen dataclass cannot")
    return part
