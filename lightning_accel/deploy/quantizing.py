"""Quantises a trained model to INT8, FP16 or bfloat16."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from lightning_accel.core.byte_size import format_bytes
from lightning_accel.core.checks import check_choice
from lightning_accel.core.module_copies import plain_copy
from lightning_accel.core.report import one_line
from lightning_accel.core.tree import tensors_in
from lightning_accel.deploy import int8
from lightning_accel.deploy.combinations import MODES, Mode
from lightning_accel.deploy.errors import MissingPackageError, QuantizeError
from lightning_accel.deploy.half import halved
from lightning_accel.deploy.inputs import Arguments, arguments_of, inputs_and_targets, shapes_in
from lightning_accel.deploy.layer_trial import LayerTrial
from lightning_accel.deploy.losses import is_finite, measure_of, outputs_of, percent, worst

MAX_ERROR = 0.05
CALIBRATION_BATCHES = 32
TRIAL_BATCHES = 2  # for the error of single layers; ranges use all batches

_CONVERT = {"int8-dynamic": int8.dynamic, "int8-static": int8.static, "int8-weight": int8.weights_only}


@dataclass(frozen=True)
class Quantized:
    """The result of :func:`quantize`.

    Attributes:
        model: For inference, called like the original.
        original: A float copy of the original, against which INT8 forms are checked.
        mode: As requested.
        converted: The names of the converted layers; ``""`` is the model itself. Attention has four layers, ``query``,
            ``key``, ``value`` and ``out``.
        kept: Name → reason, for layers left in float.
        error: The error of the outputs on the calibration data, as a share; None if it was not measured.
        measure: What the error is a share of, in words; if there is no error, why.
        bytes_before: Size of the saved weights before.
        bytes_after: Size of the saved weights now.
    """

    model: nn.Module = field(repr=False)
    original: nn.Module = field(repr=False)
    mode: Mode
    converted: tuple[str, ...]
    kept: Mapping[str, str]
    error: float | None
    measure: str
    bytes_before: int
    bytes_after: int

    def __str__(self) -> str:
        off = f"not measured: {self.measure}" if self.error is None else f"{percent(self.error)} {self.measure}"
        layers = f"{len(self.converted)} layer{'' if len(self.converted) == 1 else 's'}"
        size = f"{format_bytes(self.bytes_before)} to {format_bytes(self.bytes_after)}"
        lines = [f"{self.mode}: {layers if self.converted else 'nothing was converted'}, {size}; error {off}"]
        if self.bytes_after > self.bytes_before:
            lines.append("  larger than before: what was converted is small, or its weights are needed in float too")
        return "\n".join([*lines, *(f"  in float: {name or 'the model'}: {why}" for name, why in self.kept.items())])


def quantize(
    model: nn.Module, mode: Mode, *, calibration: Iterable[Any] | None = None, max_error: float = MAX_ERROR
) -> Quantized:
    """Returns a copy of a trained model for inference, in lower precision. The model itself is not changed.

    With calibration data, INT8 is tried. If the outputs' error is above ``max_error``, or the model fails, layers are
    put back into float, the one that loses the most alone first, until the error is allowed. Without calibration data
    nothing is called: a model that reads a layer's weight itself then fails only at its first call.

    INT8 uses kernels of ``torch.ao``, which are deprecated and need no compiler (:mod:`lightning_accel.deploy.int8`);
    in ONNX those of ONNX Runtime; ``int8-weight`` uses torchao's. docs/results compares all of them.

    Args:
        model: Accelerated or not; on the CPU for INT8.
        mode: ``"int8-dynamic"``: weights of linear layers by output channel, inputs by their range in each call;
            ``"int8-static"``: convolutions too, with all ranges from the calibration data; ``"int8-weight"``: weights
            are stored in INT8 and computed with in float, which is smaller but not faster; ``"fp16"``, ``"bf16"``: all
            weights.
        calibration: A loader of batches like those to be served, of which the first 32 are used: ``(inputs, targets)``,
            inputs alone, or mappings. ``"int8-static"`` needs one.
        max_error: The largest error on the calibration data, as a share of the outputs' norm; for a model that returns
            only integers, the share of outputs that may differ.

    Raises:
        TypeError: ``model`` is not a module: a path, or a result of this function.
        ValueError: The mode is unknown; calibration data is missing, empty or does not fit the model; for INT8, the
            model is not on the CPU or not in float32, or a layer takes or returns NaN or infinity.
        QuantizeError: On the calibration data the model fails only in lower precision (with the line of its code), or
            in half precision the error is above ``max_error`` (with the layer in which it begins).
        MissingPackageError: torchao is not installed, for ``"int8-weight"``.
    """
    check_choice("mode", mode, MODES)
    _check_arguments(model, max_error)
    original = plain_copy(model)
    calls = []
    if calibration is not None:
        batches = islice(calibration, CALIBRATION_BATCHES)
        calls = [arguments_of(original, inputs_and_targets(original, batch)[0]) for batch in batches]
        if not calls:
            raise ValueError(
                "calibration gave no batches: give a loader with a few batches such as the model will be served, from"
                " the training data say. (An iterator that was read before has none left.)"
            )
    made: nn.Module
    kept: dict[str, str] = {}
    with torch.no_grad(), int8.without_deprecations():
        expected = [_expected(original, call, number) for number, call in enumerate(calls)]
        if mode in ("fp16", "bf16"):
            made, error = halved(original, mode, calls, expected, max_error)
            names = [name for name, one in original.named_modules() if any(True for _ in one.parameters(False))]
        else:
            made, error, names, kept = _in_int8(original, mode, calls, expected, max_error)
    measure = measure_of(expected) if calls else "no calibration data, and no call was tried"
    return Quantized(
        model=made,
        original=original,
        mode=mode,
        converted=tuple(names),
        kept=kept,
        error=error if calls and measure else None,
        measure=measure or "on the calibration data the model returns no finite numbers",
        bytes_before=saved_bytes(original),
        bytes_after=saved_bytes(made),
    )


def saved_bytes(model: nn.Module) -> int:
    """Returns the bytes of the ``state_dict`` as written by ``torch.save``."""
    buffer = io.BytesIO()
    with int8.without_deprecations():
        torch.save(model.state_dict(), buffer)
    return buffer.tell()


def _in_int8(
    original: nn.Module, mode: Mode, calls: list[Arguments], expected: list[list[Tensor]], max_error: float
) -> tuple[nn.Module, float, list[str], dict[str, str]]:
    """Returns a copy in INT8, its error, the names of layers in INT8, and name → why not for others."""
    if mode == "int8-static" and not calls:
        raise ValueError("mode='int8-static' takes its ranges from data: calibration=loader, with a few batches.")
    devices = {p.device.type for p in original.parameters()} - {"cpu"}
    if devices:
        raise ValueError(f"mode={mode!r} computes on a CPU, and the model is on {devices.pop()}: model.cpu() before.")
    model = int8.prepare(plain_copy(original))
    names, kept = int8.choose(model, mode)
    for name in names if mode != "int8-weight" else ():
        for parameter in model.get_submodule(name).parameters():
            if parameter.dtype != torch.float32:
                raise ValueError(
                    f"mode={mode!r} takes a model in float32, and {f'layer {name!r}' if name else 'the model'} is in"
                    f" {parameter.dtype}: model.float() before, and batches in float32."
                )
    layers = {name: model.get_submodule(name) for name in names}
    sources: Mapping[str, nn.Module] = layers
    if mode == "int8-static":
        sources = int8.observed(model, names, dict(enumerate(calls)))
        kept |= {name: "the calibration data did not call it" for name in names if name not in sources}
    elif mode == "int8-dynamic":
        int8.observed(model, names, {n: call for n, call in enumerate(calls) if not is_finite((call, expected[n]))})
    converted = {}
    for name, source in sources.items():
        try:
            converted[name] = _CONVERT[mode](source)
        except MissingPackageError:
            raise
        except Exception as why:  # no kernel for this size, say
            kept[name] = f"could not be converted: {one_line(why)}"
    trial = LayerTrial(model, layers, converted, calls[:TRIAL_BATCHES], expected[:TRIAL_BATCHES])
    trial.put(converted)
    if not calls:
        return trial.model, 0.0, list(converted), kept
    kept |= trial.put_back(max_error)
    try:
        error = worst(trial.model, calls, expected)
    except Exception as why:
        raise QuantizeError(
            f"mode={mode!r}: the model fails in INT8 on the calibration data, where in float it does not:"
            f" {one_line(why)}. Layers are tried on the first {TRIAL_BATCHES} batches: give one first that leads there."
        ) from why
    return trial.model, error, [name for name in converted if name not in kept], kept


def _check_arguments(model: object, max_error: object) -> None:
    if not isinstance(max_error, int | float) or not 0 < max_error < math.inf:
        raise ValueError(f"max_error={max_error!r}: give a share of the outputs' norm above 0, 0.05 for 5% say.")
    if isinstance(model, Quantized):
        raise TypeError(f"model is what quantize() has made, {model.mode}: give the one in float, its .original.")
    if isinstance(model, str | os.PathLike):
        raise TypeError(
            f"model={model!r} is a path: give a module. A checkpoint is loaded by its class:"
            f" YourModule.load_from_checkpoint({os.fspath(model)!r})."
        )
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is of type {type(model).__name__}: give a torch.nn.Module or a LightningModule.")


def _expected(model: nn.Module, call: Arguments, number: int) -> list[Tensor]:
    batch = f"batch {number} of the calibration data, with tensors of {shapes_in(call)}"
    batched = [tensor for tensor in tensors_in(call) if tensor.dim()]
    if batched and not batched[0].shape[0]:
        raise ValueError(f"calibration: {batch}, has no rows: give batches such as the model will be served.")
    try:
        return outputs_of(model, call)
    except Exception as error:
        raise ValueError(
            f"The model failed on {batch}: {one_line(error)}. Give batches as the model takes them: (inputs, targets),"
            " or inputs alone."
        ) from error
