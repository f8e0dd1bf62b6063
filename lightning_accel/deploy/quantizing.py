"""A trained model with smaller numbers: INT8, FP16 or bfloat16."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_accel.core.byte_size import format_bytes
from lightning_accel.core.checks import check_choice
from lightning_accel.core.trial import one_line
from lightning_accel.deploy import int8
from lightning_accel.deploy.beginnings import first_off
from lightning_accel.deploy.combinations import MODES, Mode
from lightning_accel.deploy.errors import QuantizeError
from lightning_accel.deploy.half import HalfPrecision
from lightning_accel.deploy.inputs import Arguments, calls_of, shapes_in
from lightning_accel.deploy.losses import measure_of, outputs_of, percent, worst
from lightning_accel.deploy.plain import plain_copy
from lightning_accel.deploy.restoring import Trial

MAX_ERROR = 0.05
CALIBRATION_BATCHES = 32
TRIAL_BATCHES = 2
"""So many batches tell how much a layer loses; ranges are taken from all."""


@dataclass(frozen=True)
class Quantized:
    """What :func:`quantize` has made.

    Attributes:
        model: For inference, called as the original was.
        original: A copy of it in float, by which forms of INT8 are judged.
        mode: As asked for.
        converted: The names of the layers that compute with smaller numbers; attention is in four layers, ``query``,
            ``key``, ``value`` and ``out``.
        kept: Of layers left in float, name → why.
        error: How far the outputs are off on the calibration data, as a share of their norm; None without any.
        bytes_before: Of the saved weights.
        bytes_after: The same, now.
    """

    model: nn.Module = field(repr=False)
    original: nn.Module = field(repr=False)
    mode: Mode
    converted: tuple[str, ...]
    kept: Mapping[str, str]
    error: float | None
    bytes_before: int
    bytes_after: int

    def __str__(self) -> str:
        off = "not measured: no calibration data" if self.error is None else f"{self.error:.2%} of the outputs' norm"
        size = f"{format_bytes(self.bytes_before)} to {format_bytes(self.bytes_after)}"
        lines = [f"{self.mode}: {len(self.converted)} layers, {size}; error {off}"]
        return "\n".join([*lines, *(f"  in float: {name or 'the model'}: {why}" for name, why in self.kept.items())])


def quantize(
    model: nn.Module, mode: Mode, *, calibration: Iterable[Any] | None = None, max_error: float = MAX_ERROR
) -> Quantized:
    """A copy of a trained model for inference, with smaller numbers; the model itself stays as it is.

    With calibration data, INT8 is tried: where outputs are off by more than ``max_error``, layers are put back into
    float, beginning with the one that loses the most alone, until they are not.

    INT8 is computed by kernels of ``torch.ao``, which are deprecated and need no compiler
    (:mod:`lightning_accel.deploy.int8`), and exported to ONNX by those of ONNX Runtime; ``int8-weight`` by torchao's.
    docs/results has all that there are beside each other.

    Args:
        model: Accelerated or not, on the CPU for INT8.
        mode: ``"int8-dynamic"``: weights of linear layers for each output channel, inputs by their range at every call;
            ``"int8-static"``: convolutions too, all ranges from the calibration data; ``"int8-weight"``: weights
            are stored in INT8 and computed with in float, smaller and not faster; ``"fp16"``, ``"bf16"``: all weights.
        calibration: A loader of batches such as the model will be served, of which the first 32 are looked at:
            ``(inputs, targets)``, inputs alone, or mappings. ``"int8-static"`` needs one.
        max_error: What share of the outputs' norm they may be off, on the calibration data.

    Raises:
        ValueError: An unknown mode; calibration data that is missing, empty, or not what the model takes; a model that
            is not on the CPU, for INT8.
        QuantizeError: In half precision the outputs are off by more than ``max_error`` on the calibration data; the
            message names the layer in which that begins.
        MissingPackageError: torchao is not installed, for ``"int8-weight"``.
    """
    check_choice("mode", mode, MODES)
    if not 0 < max_error < math.inf:
        raise ValueError(f"max_error={max_error!r}: give a share of the outputs' norm above 0, 0.05 say.")
    original = plain_copy(model)
    calls = (
        [] if calibration is None else calls_of(original, calibration, at_most=CALIBRATION_BATCHES, name="calibration")
    )
    with torch.no_grad():
        expected = [_outputs(original, call, number) for number, call in enumerate(calls)]
        if mode in ("fp16", "bf16"):
            half = HalfPrecision(plain_copy(original), torch.float16 if mode == "fp16" else torch.bfloat16)
            names = tuple(name for name, one in original.named_modules() if any(True for _ in one.parameters(False)))
            error = _error(half, calls, expected) if calls else None
            if error is not None and not error <= max_error:
                raise QuantizeError(_off(original, mode, half.dtype, error, calls[:TRIAL_BATCHES], max_error))
            return Quantized(half.eval(), original, mode, names, {}, error, saved_bytes(original), saved_bytes(half))
        return _in_int8(original, mode, calls, expected, max_error)


def saved_bytes(model: nn.Module) -> int:
    """Bytes of the ``state_dict`` as ``torch.save`` writes it."""
    buffer = io.BytesIO()
    with int8.without_deprecations():
        torch.save(model.state_dict(), buffer)
    return buffer.tell()


def _in_int8(
    original: nn.Module, mode: Mode, calls: list[Arguments], expected: list[list[Tensor]], max_error: float
) -> Quantized:
    if mode == "int8-static" and not calls:
        raise ValueError("mode='int8-static' takes its ranges from data: calibration=loader, with a few batches.")
    devices = {p.device.type for p in original.parameters()} - {"cpu"}
    if devices:
        raise ValueError(f"mode={mode!r} computes on a CPU, and the model is on {devices.pop()}: model.cpu() before.")
    model = int8.prepare(plain_copy(original))
    names, kept = int8.choose(model, mode)
    convert: int8.Convert = int8.weights_only if mode == "int8-weight" else int8.dynamic
    if mode == "int8-static":
        ranges = int8.observed(model, names, lambda: [_outputs(model, call, 0) for call in calls])
        kept |= {
            name: "the calibration data did not call it" for name in names if model.get_submodule(name) not in ranges
        }
        convert = int8.static(ranges)
    layers = {name: model.get_submodule(name) for name in names if name not in kept}
    converted = {}
    for name, layer in layers.items():
        try:
            converted[name] = convert(layer)
        except int8.MissingPackageError:
            raise
        except Exception as why:  # a size for which there is no kernel
            kept[name] = f"could not be converted: {one_line(why)}"
    trial = Trial(model, layers, converted, calls[:TRIAL_BATCHES], expected[:TRIAL_BATCHES])
    trial.put(converted)
    if calls:
        kept |= trial.put_back(max_error)
    model = trial.model
    error = _error(model, calls, expected) if calls else None
    done = tuple(name for name in converted if name not in kept)
    return Quantized(model, original, mode, done, kept, error, saved_bytes(original), saved_bytes(model))


def _off(
    original: nn.Module, mode: Mode, dtype: torch.dtype, error: float, calls: list[Arguments], max_error: float
) -> str:
    """What is to be said of a model whose outputs are off in half precision, and in which layer that begins."""

    def is_off(module: nn.Module, inner: list[Arguments]) -> bool:
        try:
            expected = [_outputs(module, call, 0) for call in inner]
            return not _error(HalfPrecision(plain_copy(module), dtype).eval(), inner, expected) <= max_error
        except Exception:  # it takes or returns what has no half precision
            return False

    where = first_off(original, calls, is_off)
    begins = f" It begins in {where}." if where else " No layer alone is off by as much."
    other = " 'bf16' has the range of float32." if mode == "fp16" else ""
    amount = f"{error:.1%} of their norm" if math.isfinite(error) else "more than can be told: infinite, or no numbers"
    return f"mode={mode!r} has the outputs off by {amount}; allowed is {max_error:.1%}.{begins}{other}"


def _error(model: nn.Module, calls: list[Arguments], expected: list[list[Tensor]]) -> float:
    with int8.without_deprecations():
        return worst(model, calls, expected)


def _outputs(model: nn.Module, call: Arguments, number: int) -> list[Tensor]:
    try:
        with int8.without_deprecations():
            return outputs_of(model, call)
    except Exception as error:
        raise ValueError(
            f"The model failed on batch {number} of the calibration data, with tensors of {shapes_in(call)}:"
            f" {one_line(error)}. Give batches as the model takes them: (inputs, targets), or inputs alone."
        ) from error
