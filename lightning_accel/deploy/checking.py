"""Checks a written form against the original, on the example, on other numbers and on other sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_accel.core.device import device_of
from lightning_accel.core.tree import tensors_in
from lightning_accel.deploy.agreement import differs
from lightning_accel.deploy.captured import Captured, inputs_of
from lightning_accel.deploy.errors import DynamicDimensionError, ExportError, in_words, users_line_of
from lightning_accel.deploy.first_divergence import first_off
from lightning_accel.deploy.forms import ExportForm
from lightning_accel.deploy.half import HalfPrecision
from lightning_accel.deploy.inputs import Arguments, shapes_in
from lightning_accel.deploy.losses import is_finite
from lightning_accel.deploy.shapes import Dimension, Dynamic, Name, dimensions_of, other_numbers, other_sizes, sizes_of

Call = Callable[..., Any]


@dataclass(frozen=True)
class Checked:
    """The result of a check."""

    fixed: dict[Dimension, int]  # dimensions that were to be dynamic but are fixed → size
    at_most: dict[Dimension, int]  # dynamic dimensions with an upper limit in the original → limit
    calls: list[Arguments]  # calls on which the file agrees with the original, without those on other numbers
    error: float  # the largest relative error in any call


@dataclass(frozen=True)
class Check:
    """What a file is compared with."""

    original: nn.Module
    arguments: Arguments  # the example
    dynamic: Dynamic  # as requested
    form: ExportForm  # what was written
    quantized: nn.Module | None  # the original in torch's INT8, if the form has its own INT8

    def example(self) -> None:
        """Raises if the original fails on the example, or returns nothing that a form could be checked against."""
        args, kwargs = self.arguments
        try:
            outputs = self.original(*args, **kwargs)
        except Exception as error:
            line = users_line_of(error)
            at = f" at {line}" if line else ""
            raise ExportError(
                f"the model itself fails on the example, {shapes_in(self.arguments)},{at}: {in_words(error)}."
                f"{_in_half(self.original)} Nothing was written."
            ) from error
        numbers = [t for t in tensors_in(outputs) if t.is_floating_point() or t.is_complex()]
        for index, one in enumerate(numbers):
            if not torch.isfinite(one).any():
                has = "only NaN and infinities" if one.numel() else "no numbers"
                raise ExportError(
                    f"the model's own output {index}, {tuple(one.shape)}, has {has} on the example, so that no form can"
                    " be checked against it: look at the weights, or give another example. Nothing was written."
                )

    def of(self, path: Path, captured: Captured) -> Checked:
        """Loads and checks the file at ``path``.

        Raises:
            DynamicDimensionError: A dimension that was requested as dynamic is fixed.
            ExportError: The file cannot be loaded, or computes something else.
        """
        try:
            call = self.form.load(path, device_of(self.original))
        except Exception as raised:  # no kernel for an operator in this precision, say
            why = f"cannot load what it has written: {in_words(raised)}"
            raise ExportError(f"form={self.form.name!r} {why}.") from raised
        fixed = _fixed(captured) if self.form.has_graph else {}
        open_ones = [one for one in captured.dimensions if one not in fixed]
        taken: list[tuple[Name, Arguments]] = []
        at_most: dict[Dimension, int] = {}
        for name, size in sizes_of(self.arguments, open_ones).items():
            alike = [one for one in open_ones if one.name == name]
            tried = other_sizes(self.arguments, open_ones, name)
            possible = {other: one for other, one in tried.items() if attempt(self.original, one) is not None}
            takes_all = all(attempt(call, one) is not None for one in possible.values())
            if not self.form.has_graph and not (possible and takes_all):
                fixed |= dict.fromkeys(alike, size)
                continue
            if possible and max(possible) < size:
                at_most |= dict.fromkeys(alike, size)
            taken += [(name, one) for one in possible.values()]
        if fixed and self.dynamic != "auto":
            raise DynamicDimensionError(self._in_one_size(fixed, captured))
        calls = [self.arguments, *(one for _, one in taken)]
        failure, off = self._differs(call, calls)
        advice = self._about_sizes(call, taken) if failure and not self.form.has_graph else ""
        others = other_numbers(self.arguments)
        if not failure and (outputs := attempt(self.original, others)) is not None and is_finite(outputs):
            failure, more = self._differs(call, [others])
            failure, off = failure and f"{failure} with other numbers than the example's", max(off, more)
        if failure:
            verb = "computes " if failure.startswith("other numbers") else ""
            why = self._why(call, calls, path.parent)
            raise ExportError(f"form={self.form.name!r} {verb}{failure}.{why}{advice} Nothing was written.")
        return Checked(fixed, at_most, calls, off)

    def _differs(self, call: Call, calls: list[Arguments]) -> tuple[str, float]:
        return differs(self.original, call, calls, self.quantized)

    def _in_one_size(self, fixed: Mapping[Dimension, int], captured: Captured) -> str:
        named = ", ".join(f"{label(one, captured)} is {size}" for one, size in fixed.items())
        return (
            f"form={self.form.name!r}: the model fixes {named}: a table of positions, a reshape or a comparison with"
            " that number. dynamic='auto' leaves such dimensions fixed."
        )

    def _about_sizes(self, call: Call, taken: list[tuple[Name, Arguments]]) -> str:
        """Returns advice if the file is wrong only because it has stored a size of the example."""
        for dynamic, names in (("batch", ["batch"]), ("off", [])):
            calls = [self.arguments, *(one for name, one in taken if name in names)]
            if len(calls) <= len(taken) and not self._differs(call, calls)[0]:
                return (
                    f" The file holds a size of the example's: dynamic={dynamic!r} writes it for calls of that size"
                    " only, 'pt2' and 'onnx' take any."
                )
        return ""

    def _why(self, call: Call, calls: list[Arguments], folder: Path) -> str:
        """Returns where, or why, a form's numbers are wrong."""
        first, second = (attempt(self.original, self.arguments) or [] for _ in range(2))
        pairs = zip(first, second, strict=False)
        if not all(torch.equal(one.nan_to_num(), other.nan_to_num()) for one, other in pairs):
            return " The model draws random numbers: two calls of its own differ, and the file draws others."
        for index, (one, other) in enumerate(zip(first, attempt(call, self.arguments) or [], strict=False)):
            if one.dtype != other.dtype:
                return f" Output {index} is {other.dtype} in the file and {one.dtype} in the model."
        if any(one.dtype == torch.float64 for one in first) and self.form.name != "pt2":
            return " The model returns float64, and the form may compute in float32 inside: return that, or take 'pt2'."

        def is_off(name: str, calls: list[Arguments]) -> bool:
            module = self.original.get_submodule(name)
            quantized = None if self.quantized is None else self.quantized.get_submodule(name)
            path = folder / f"part{self.form.ending}"
            self.form.write(self.form.captured(module, calls[0], dimensions_of(calls[0], "auto"), quantized), path)
            return bool(differs(module, self.form.load(path, device_of(self.original)), calls, quantized)[0])

        # Compiling one part after another would take too long.
        where = "" if self.form.name == "aoti" else first_off(self.original, calls, is_off)
        return f" It begins in {where}." if where else ""


def label(one: Dimension, captured: Captured) -> str:
    """Describes a dimension: ``tokens: 1 (sequence)``."""
    nodes = inputs_of(captured.program) if "program" in vars(captured) else []
    name = nodes[one.index].name if nodes else f"input {one.index}"
    return f"{name}: {one.axis} ({one.name})"


def _fixed(captured: Captured) -> dict[Dimension, int]:
    """Returns the requested dynamic dimensions that the model has fixed, with their sizes."""
    shapes = [node.meta["val"].shape for node in inputs_of(captured.program)]
    sizes = {one: str(shapes[one.index][one.axis]) for one in captured.dimensions}  # a dynamic one is a symbol
    return {one: int(size) for one, size in sizes.items() if size.isdigit()}


def attempt(call: Call, arguments: Arguments) -> list[Tensor] | None:
    """Returns the output tensors of a call; None if it fails, such as for a sequence beyond a position table."""
    args, kwargs = arguments
    try:
        return tensors_in(call(*args, **kwargs))
    except Exception:
        return None


def _in_half(model: nn.Module) -> str:
    if not isinstance(model, HalfPrecision):
        return ""
    name = str(model.dtype).removeprefix("torch.")
    return (
        f" It may make float32 inside forward(), which does not go with weights in {name}: make tensors with"
        " dtype=x.dtype there, or leave precision out."
    )
