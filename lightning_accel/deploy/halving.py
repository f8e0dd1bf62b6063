"""A model in half precision, tried on calibration data, and what is to be said where it fails or is off."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lightning_accel.core.module_copies import plain_copy
from lightning_accel.core.report import one_line
from lightning_accel.core.tree import tensors_in
from lightning_accel.core.user_frames import users_line
from lightning_accel.deploy.errors import QuantizeError, users_line_of
from lightning_accel.deploy.first_divergence import first_off
from lightning_accel.deploy.half import DTYPES, HalfPrecision
from lightning_accel.deploy.inputs import Arguments
from lightning_accel.deploy.losses import outputs_of, percent, worst

_TRIED = 2
"""So many batches tell in which layer it begins."""


def halved(
    original: nn.Module, mode: str, calls: list[Arguments], expected: Sequence[Sequence[Tensor]], max_error: float
) -> tuple[HalfPrecision, float]:
    """A copy in half precision, and how far it is off on these calls; 0 without any.

    Raises:
        QuantizeError: It fails there, where the original does not, or is off by more than ``max_error``.
    """
    half = HalfPrecision(plain_copy(original), DTYPES[mode]).eval()
    try:
        error = worst(half, calls, expected) if calls else 0.0
    except Exception as failure:
        raise QuantizeError(_fails(half, mode, calls, failure)) from failure
    if not error <= max_error:
        raise QuantizeError(_off(original, mode, error, calls[:_TRIED], max_error))
    return half, error


class _MadeWide(TorchFunctionMode):
    """Notes the line of the user's that has last made float32 of other numbers, or of nothing."""

    line = ""

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made, given = ({t.dtype for t in tensors_in(data)} for data in (result, (args, kwargs or {})))
        if torch.float32 in made - given:
            self.line = users_line() or self.line
        return result


def _fails(half: HalfPrecision, mode: str, calls: list[Arguments], failure: Exception) -> str:
    line = users_line_of(failure)
    where = f" at {line}" if line else ""
    said = f"mode={mode!r}: the model fails in {half.dtype}{where}: {one_line(failure)}. In float32 it does not."
    watched = _MadeWide()
    try:
        with watched:
            for args, kwargs in calls:
                half(*args, **kwargs)
    except Exception:  # the same again
        if watched.line:
            return (
                f"{said} It makes float32 numbers itself, last at {watched.line}: have them in the weights' precision,"
                " .to(self.weight.dtype) say, with a weight of yours, instead of .float()."
            )
    return said


def _off(original: nn.Module, mode: str, error: float, calls: list[Arguments], max_error: float) -> str:
    """What is to be said of a model whose outputs are off in half precision, and in which layer that begins."""

    def is_off(module: nn.Module, inner: list[Arguments]) -> bool:
        try:
            expected = [outputs_of(module, call) for call in inner]
            return not worst(HalfPrecision(plain_copy(module), DTYPES[mode]).eval(), inner, expected) <= max_error
        except Exception:  # it takes or returns what has no half precision
            return False

    where = first_off(original, calls, is_off)
    begins = f" It begins in {where}." if where else " No layer alone is off by as much."
    other = " 'bf16' has the range of float32." if mode == "fp16" else ""
    amount = percent(error) if math.isfinite(error) else "more than can be told: infinite, or no numbers"
    return f"mode={mode!r} has the outputs off by {amount}; allowed is {percent(max_error)}.{begins}{other}"
