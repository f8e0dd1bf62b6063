"""Which dimensions of an example are a batch's and a sequence's, and the same example with others of them."""

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

_LEAST = 2  # torch takes a dimension of size 1 for one that stays so


@dataclass(frozen=True)
class Dimension:
    """One dimension of one tensor of the inputs."""

    index: int  # of the tensor, in the order of the inputs
    axis: int  # of the dimension
    name: Name  # whose size it is


def dimensions_of(arguments: Arguments, dynamic: Dynamic) -> list[Dimension]:
    """Those that may change from call to call.

    The batch is the first dimension of every tensor in which that is as large as the first one's. The sequence is the
    second dimension of tokens, (B, T) of whole numbers, and of features, (B, T, D), where it is as large as the first.
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
    """The arguments with other sizes: what there is of a dimension, over and over."""
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
    """Name → size."""
    tensors = tensors_in(arguments)
    return {one.name: tensors[one.index].shape[one.axis] for one in reversed(dimensions)}


def widened(arguments: Arguments, dimensions: list[Dimension]) -> Arguments:
    """An example to capture the model with: no dimension that may change is of size 1."""
    sizes = sizes_of(arguments, dimensions)
    return resized(arguments, dimensions, {name: _LEAST for name, size in sizes.items() if size < _LEAST})


def other_sizes(arguments: Arguments, dimensions: list[Dimension], name: Name) -> dict[int, Arguments]:
    """The example with other sizes of one dimension: batches of 1 and one more, sequences of half and one more."""
    size = sizes_of(arguments, dimensions)[name]
    tried = {1 if name == "batch" else max(1, size // 2), size + 1} - {size}
    return {other: resized(arguments, dimensions, {name: other}) for other in sorted(tried)}


def other_numbers(arguments: Arguments) -> Arguments:
    """The example with numbers that are as good: rows in another order; tokens, too, and features half as large.

    Whole numbers may be indices into a table: there are none but the example's. Masks keep their rows as they are, as
    what comes of one that masks everything is nobody's to say.
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
    """For ``torch.export``: these dimensions are to stay open if the model lets them."""
    if not dimensions:
        return None
    kind: Any = ShapesCollection
    shapes = kind()
    for index, tensor in enumerate(tensors_in(arguments)):
        axes = {one.axis: Dim.AUTO for one in dimensions if one.index == index}
        if axes:
            shapes[tensor] = axes
    return shapes.dynamic_shapes(model, *arguments)
