"""Exports a trained model to a file for serving, loads the file and checks that it computes the same."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

import torch
from torch import nn

from lightning_accel.core.byte_size import format_bytes
from lightning_accel.core.checks import check_choice
from lightning_accel.core.device import device_of
from lightning_accel.core.module_copies import plain_copy
from lightning_accel.core.report import AccelWarning
from lightning_accel.core.tree import map_tensors
from lightning_accel.deploy.captured import Captured
from lightning_accel.deploy.checking import Check, label
from lightning_accel.deploy.combinations import FormName, Mode, Numbers, Precision, check_held, forms_with
from lightning_accel.deploy.destination import put, target_of
from lightning_accel.deploy.errors import ExportError, failing_node, in_words, users_line_in, users_line_of
from lightning_accel.deploy.forms import FORMS, ExportForm
from lightning_accel.deploy.half import DTYPES, HalfPrecision
from lightning_accel.deploy.inputs import arguments_of, positions, shapes_in
from lightning_accel.deploy.int8 import is_converted, prepare, without_deprecations
from lightning_accel.deploy.quantizing import Quantized
from lightning_accel.deploy.sessions import WithConstants, constants_of
from lightning_accel.deploy.shapes import Dynamic, dimensions_of, sizes_of


@dataclass(frozen=True)
class Exported:
    """The result of :func:`export`.

    Attributes:
        path: The file.
        form: Its form.
        precision: The precision in which weights are stored.
        dynamic: The dimensions of the inputs that may have any size, as ``"x: 0 (batch)"``; or any size up to the
            example's, if the original accepts no more: ``"x: 1 (sequence), 6 at most"``.
        fixed: Dimension → size, for dimensions that were to be dynamic but are fixed by the model.
        checked: The input shapes, in words, on which the file agrees with the original. In the example's shape, other
            numbers were tried too.
        error: The largest relative error found in these checks.
        num_bytes: The size of the file and of files beside it.
        device_type: The type of device for which the file was written.
        parameters: The names of the arguments, in order.
        constants: Arguments that are not tensors → their values, which the file uses for every call.
    """

    path: Path
    form: FormName
    precision: Numbers
    dynamic: tuple[str, ...]
    fixed: Mapping[str, int]
    checked: tuple[str, ...]
    error: float
    num_bytes: int
    device_type: str
    parameters: tuple[str, ...] = ()
    constants: Mapping[str, Any] = field(default_factory=dict)

    def load(self) -> Callable[..., Any]:
        """Returns the model from the file, to be called like the original. ONNX and OpenVINO return a list of tensors.

        A call with another value for a constant raises a ValueError.
        """
        call = FORMS[self.form].load(self.path, torch.device(self.device_type))
        return WithConstants(call, self.parameters, self.constants) if self.constants else call

    def __str__(self) -> str:
        off = f"error {self.error:.1e} on {len(self.checked)} shape{'s' if len(self.checked) > 1 else ''}"
        form = self.form if self.precision == "32" else f"{self.form}+{self.precision}"
        lines = [f"{self.path}: {form}, {format_bytes(self.num_bytes)}, {off}"]
        lines += [f"  any size: {name}" for name in self.dynamic]
        lines += [f"  fixed by the model: {name} is {size}" for name, size in self.fixed.items()]
        return "\n".join(
            [*lines, *(f"  constant in the file: {name} is {one!r}" for name, one in self.constants.items())]
        )


def export(
    model: nn.Module | Quantized,
    example: Any,
    form: FormName = "pt2",
    *,
    path: str | Path | None = None,
    dynamic: Dynamic = "auto",
    precision: Precision = "32",
) -> Exported:
    """Writes a model to a file for serving, completely or not at all.

    The model, accelerated or not, is exported as its author wrote it, and is not changed. The file is loaded again and
    called on inputs of several sizes: its outputs must be within the spread of the original's own (docs/numbers.md).
    Attention that the model writes out becomes torch's single operation in the file, except for ONNX and TorchScript.
    INT8 in ONNX, whose kernels round differently, may have three times the error of ``quantize`` against the float
    model, with dynamic ranges four times.

    Args:
        model: A module, or a result of ``quantize``.
        example: What ``forward`` takes: a tensor, a tuple of positional arguments, or a mapping of keyword arguments.
        form: ``"pt2"``, torch's own graph; ``"aoti"``, compiled for this kind of machine; ``"onnx"``; ``"tensorrt"``,
            for a model on an NVIDIA GPU; ``"torchscript"``, which torch has deprecated; ``"openvino"``.
        path: The file; by default ``model.onnx``, ``model.fp16.onnx``, ``model.aoti.pt2``, in the working folder.
        dynamic: Which dimensions may have any size: ``"auto"``, batch and sequence unless the model fixes them;
            ``"batch"`` and ``"batch+sequence"``, these or an error; ``"off"``, none.
        precision: ``"fp16"`` and ``"bf16"`` store and compute in this precision, between inputs and outputs in float32.
            For INT8 pass the result of ``quantize``.

    Raises:
        ValueError: Form, precision or ``dynamic`` is unknown; the form does not support the precision
            (:mod:`lightning_accel.deploy.combinations`); the example has no tensors, or empty ones; the form's library
            does not write files with the path's ending.
        TypeError: The model is a ScriptModule.
        MissingPackageError: The form needs a package, a compiler or a device. The message says how to get it.
        ExportError: The model cannot be written in this form (with the line of its code, if known), or computes other
            numbers in it (with the module where they begin); the model itself fails on the example, or returns nothing
            that a form could be checked against.
        OSError: The file cannot be written.
    """
    numbers = _numbers_of(model, precision)
    check_held(form, numbers)
    check_choice("dynamic", dynamic, get_args(Dynamic))
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError(
            "model is a ScriptModule, which is TorchScript already: give the nn.Module that it was made of."
        )
    kind = FORMS[form]
    target = target_of(path, form, numbers)
    original = plain_copy(model.model if isinstance(model, Quantized) else model).requires_grad_(False)
    quantized = None
    if precision in DTYPES:
        original = HalfPrecision(original, DTYPES[precision])
    elif isinstance(model, Quantized) and kind.quantizes and any(map(is_converted, original.modules())):
        original, quantized = prepare(plain_copy(model.original)).requires_grad_(False), original
    device = device_of(original)
    kind.require(device)
    arguments = arguments_of(original, example)
    arguments = map_tensors(lambda t: t.detach().to(device).contiguous(), arguments)  # a captured graph checks strides
    dimensions = dimensions_of(arguments, dynamic)
    if 0 in sizes_of(arguments, dimensions).values():
        raise ValueError(f"an example with tensors of {shapes_in(arguments)}, which are empty: give one row at least.")
    captured = kind.captured(original, arguments, dimensions, quantized)
    check = Check(original, arguments, dynamic, kind, quantized)
    checked, remark = None, ""
    target.parent.mkdir(parents=True, exist_ok=True)
    # On the same disk, from which the file is moved to its place.
    beside = TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.", ignore_cleanup_errors=True)
    with torch.no_grad(), without_deprecations(), beside as folder:
        temporary = Path(folder, target.name)
        check.example()
        while checked is None:
            try:
                _write(kind, captured, temporary)
                checked = check.of(temporary, captured)
            except ExportError as failed:
                if not captured.has_fused:
                    raise  # an error without fusion too is the model's
                captured, remark = replace(captured, fuses_attention=False), str(failed)
        num_bytes = put(Path(folder), target)
    if remark:
        warnings.warn(f"attention is in the file as the model spells it out: {remark}", AccelWarning, stacklevel=2)
    at_most = {one: f", {size} at most" for one, size in checked.at_most.items()}
    return Exported(
        path=target,
        form=form,
        precision=numbers,
        dynamic=tuple(label(one, captured) + at_most.get(one, "") for one in dimensions if one not in checked.fixed),
        fixed={label(one, captured): size for one, size in checked.fixed.items()},
        checked=tuple(shapes_in(call) for call in checked.calls),
        error=checked.error,
        num_bytes=num_bytes,
        device_type=device.type,
        parameters=tuple(one.name for one in positions(original)),
        constants=constants_of(original, arguments),
    )


def _numbers_of(model: nn.Module | Quantized, precision: Precision) -> Numbers:
    """Returns the precision to be written."""
    if not isinstance(model, Quantized):
        is_mode = precision in get_args(Mode)
        more = f"and of quantize(model, {precision!r}) what it returns" if is_mode else ""
        check_choice("precision", precision, get_args(Precision), more)
        return precision
    if precision != "32":
        raise ValueError(
            f"precision={precision!r} of a model that quantize() has made {model.mode}: leave precision out, or export"
            " the model itself."
        )
    return model.mode


def _write(kind: ExportForm, captured: Captured, path: Path) -> None:
    try:
        kind.write(captured, path)
    except OSError:
        raise
    except Exception as error:
        line = users_line_of(error)
        if node := failing_node(error):
            # The exporter sometimes renames decomposed nodes: bessel_j0 for special_bessel_j0.
            nodes = captured.program.graph.nodes
            traces = [str(one.meta.get("stack_trace", "")) for one in nodes if one.name.endswith(node)]
            line = next(filter(None, map(users_line_in, traces)), line)
        at = f" at {line}" if line else ""
        more, holding = "", " or ".join(map(repr, forms_with("int8-dynamic")))
        if "LinearPackedParams" in str(error) or "Conv2dPackedParams" in str(error):
            more = f" Export what quantize() has returned, not its .model alone, as {holding}."
        raise ExportError(f"form={kind.name!r} cannot hold this model{at}: {in_words(error)}.{more}") from error
