"""A model captured as a graph of torch's operations, from which forms are written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram

from lightning_accel.core.torch_private.modules import registrations_unwatched_after
from lightning_accel.core.torch_private.recurrence import recurrence_whole
from lightning_accel.deploy.fused_attention import fuse_attention
from lightning_accel.deploy.inputs import Arguments
from lightning_accel.deploy.shapes import Dimension, as_torch_wants


@dataclass(frozen=True)
class Captured:
    """A model that is to be written."""

    model: nn.Module = field(repr=False)  # plain, in eval mode
    arguments: Arguments  # an example
    dimensions: list[Dimension]  # those that may have other sizes
    fuses_attention: bool  # whether to fuse attention that the model writes out
    keeps_recurrence: bool  # whether an LSTM or GRU stays one operation, for any sequence length
    quantized: nn.Module | None = field(default=None, repr=False)  # the model with layers in torch's INT8, if any

    @cached_property
    def program(self) -> ExportedProgram:
        """The model as a graph of torch's operations, captured once."""
        return self._captured[0]

    @property
    def has_fused(self) -> bool:
        """Whether the captured graph has a fused attention operation where the model has several operations."""
        return "_captured" in vars(self) and self._captured[1] > 0

    @cached_property
    def _captured(self) -> tuple[ExportedProgram, int]:
        shapes = as_torch_wants(self.model, self.arguments, self.dimensions)
        with ExitStack() as stack:
            stack.enter_context(registrations_unwatched_after())
            if self.keeps_recurrence:
                stack.enter_context(recurrence_whole())
            program = torch.export.export(self.model, *self.arguments, dynamic_shapes=shapes)
        return program, fuse_attention(program) if self.fuses_attention else 0


def user_inputs_of(program: ExportedProgram) -> list[fx.Node]:
    """Returns the graph's inputs in order, including those that are not tensors."""
    kinds = [spec.kind.name for spec in program.graph_signature.input_specs]
    nodes = [node for node in program.graph.nodes if node.op == "placeholder"]
    return [node for node, kind in zip(nodes, kinds, strict=True) if kind == "USER_INPUT"]


def inputs_of(program: ExportedProgram) -> list[fx.Node]:
    """Returns the tensor inputs in order."""
    return [node for node in user_inputs_of(program) if isinstance(node.meta.get("val"), Tensor)]


def output_names_of(program: ExportedProgram) -> list[str]:
    """Returns the model's names of its tensor outputs: keys and fields, otherwise ``output_0`` and so on."""
    structure: Any = program.call_spec.out_spec
    names = _names_in(structure.unflatten(range(structure.num_leaves)))
    specs = [spec for spec in program.graph_signature.output_specs if spec.kind.name == "USER_OUTPUT"]
    taken = {node.name for node in program.graph.nodes}
    found = [
        f"output_{name}" if name[:1].isdigit() or name in taken - {spec.arg.name} else name
        for name, spec in zip(names, specs, strict=True)
        if type(spec.arg).__name__ == "TensorArgument"
    ]
    return found if len({*found}) == len(found) else [f"output_{index}" for index in range(len(found))]


def _names_in(data: Any, prefix: str = "") -> Iterator[str]:
    """Yields the path of each leaf: ``logits``, ``states_0``."""
    if isinstance(data, Mapping):
        parts = [*data.items()]
    elif is_dataclass(data):
        parts = [(one.name, getattr(data, one.name)) for one in fields(data)]
    elif isinstance(data, tuple | list):
        parts = [*zip(getattr(data, "_fields", range(len(data))), data, strict=True)]
    else:
        yield prefix or "0"
        return
    for key, part in parts:
        yield from _names_in(part, f"{prefix}_{key}".lstrip("_"))
