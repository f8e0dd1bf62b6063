"""Finds the batch and sequence dimensions of an example, and makes the example in other sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.export import Dim, ShapesCollection

from lightning_accel.core.tree import map_tensors, tensors_in
from lightning_accel.deploy.inputs import Arguments

Dynamic = Literal["auto", "off", "batch", "batch+sequence"]
Name = Literal["batch", "sequence"]

_LEAST = 2  # torch treats a dimension of size 1 as fixed


@dataclass(frozen=True)
class Dimension:
    """One dimension of one input tensor."""

    index: int  # of the tensor among the inputs
    axis: int  # of the tensor
    name: Name  # what its size counts


def dimensions_of(arguments: Arguments, dynamic: Dynamic) -> list[Dimension]:
    """Returns the dimensions that may change between calls.

    The batch is the first dimension of every tensor in which it has the size of the first tensor's. The sequence is the
    second dimension of tokens, (B, T) integers, and of features, (B, T, D), if it has the size of the first such one.
    """
    if dynamic == "off":
        return []
    tensors = tensors_in(arguments)
    sizes = [t.shape[0] for t in tensors if t.dim()]
    batch = sizes[0] if sizes else 0
    lengths = [t.shape[1] for t in tensors if t.dim() == (3 if t.is_floating_point() else 2)]
    found = []
    for index, tensor in enumerate(tensors):
        if tensor.dim() and tensor.shape[0] == batch:
            found.append(Dimension(index, 0, "batch"))
            if dynamic != "batch" and lengths and tensor.dim() > 1 and tensor.shape[1] == lengths[0]:
                found.append(Dimension(index, 1, "sequence"))
    return found


def resized(arguments: Arguments, dimensions: list[Dimension], sizes: Mapping[Name, int]) -> Arguments:
    """Returns the arguments with other sizes, by repeating the existing entries."""
    tensors = iter(range(len(tensors_in(arguments))))

    def change(tensor: Tensor) -> Tensor:
        index = next(tensors)
        for one in dimensions:
            if one.index == index and one.name in sizes:
                rows = torch.arange(sizes[one.name], device=tensor.device) % tensor.shape[one.axis]
                tensor = tensor.index_select(one.axis, rows)
        return tensor

    changed: Arguments = map_tensors(change, arguments)
    return changed


def sizes_of(arguments: Arguments, dimensions: list[Dimension]) -> dict[Name, int]:
    """Returns name → size."""
    tensors = tensors_in(arguments)
    return {one.name: tensors[one.index].shape[one.axis] for one in reversed(dimensions)}


def widened(arguments: Arguments, dimensions: list[Dimension]) -> Arguments:
    """Returns an example for capturing the model: no dimension that may change has size 1."""
    sizes = sizes_of(arguments, dimensions)
    return resized(arguments, dimensions, {name: _LEAST for name, size in sizes.items() if size < _LEAST})


def other_sizes(arguments: Arguments, dimensions: list[Dimension], name: Name) -> dict[int, Arguments]:
    """Returns size → example with that size of one dimension: batch 1 and one more; sequence half and one more."""
    size = sizes_of(arguments, dimensions)[name]
    tried = {1 if name == "batch" else max(1, size // 2), size + 1} - {size}
    return {other: resized(arguments, dimensions, {name: other}) for other in sorted(tried)}


def other_numbers(arguments: Arguments) -> Arguments:
    """Returns the example with other valid numbers: rows in another order, tokens too, features half as large.

    Integers may be table indices, so no new ones are made. Masks keep their rows: the result for a fully masked row is
    undefined.
    """

    def change(tensor: Tensor) -> Tensor:
        is_mask = bool(((tensor == 0) | (tensor == 1)).all())
        is_whole = not (tensor.is_floating_point() or tensor.is_complex())
        axes = tuple(range(tensor.dim()))
        turned = tensor.flip(axes if is_whole and not is_mask else axes[:1])
        return turned if is_whole or is_mask else turned / 2

    changed: Arguments = map_tensors(change, arguments)
    return changed


def as_torch_wants(model: Any, arguments: Arguments, dimensions: list[Dimension]) -> Any:
    """Returns the dynamic shapes for ``torch.export``: these dimensions stay dynamic if the model allows."""
    if not dimensions:
        return None
    kind: Any = ShapesCollection
    shapes = kind()
    for index, tensor in enumerate(tensors_in(arguments)):
        axes = {one.axis: Dim.AUTO for one in dimensions if one.index == index}
        if axes:
            shapes[tensor] = axes
    return shapes.dynamic_shapes(model, *arguments)
