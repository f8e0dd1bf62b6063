"""A model in half precision with float32 inputs and outputs, so that it is called as before."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Sequence
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lightning_accel.core.module_copies import plain_copy
from lightning_accel.core.report import one_line
from lightning_accel.core.tree import map_tensors, tensors_in
from lightning_accel.core.user_frames import users_line
from lightning_accel.deploy.errors import QuantizeError, users_line_of
from lightning_accel.deploy.first_divergence import first_off
from lightning_accel.deploy.inputs import Arguments
from lightning_accel.deploy.losses import outputs_of, percent, worst

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
_TRIED = 2
"""The number of batches used to find the layer in which the error begins."""


class HalfPrecision(nn.Module):
    """Computes in ``dtype`` between float32 inputs and outputs. Converts the model in place."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.model = model.to(dtype)
        self.dtype = dtype
        set_parameters(self, inspect.signature(model.forward).parameters.values())
        self.eval()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = map_tensors(lambda t: t.to(self.dtype) if t.dtype == torch.float32 else t, (args, kwargs))
        return map_tensors(lambda t: t.float() if t.dtype == self.dtype else t, self.model(*args, **kwargs))


def set_parameters(wrapper: nn.Module, parameters: Iterable[inspect.Parameter]) -> None:
    """Gives a general ``forward`` a signature, from which exporters take the names of inputs."""
    written: Any = type(wrapper).forward
    forward: Any = FunctionType(written.__code__, written.__globals__, "forward")
    this = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    forward.__signature__ = inspect.Signature([this, *parameters])
    vars(wrapper)["forward"] = MethodType(forward, wrapper)


def halved(
    original: nn.Module, mode: str, calls: list[Arguments], expected: Sequence[Sequence[Tensor]], max_error: float
) -> tuple[HalfPrecision, float]:
    """Returns a copy in half precision, and its error on these calls; 0 without calls.

    Raises:
        QuantizeError: The copy fails where the original does not, or its error is above ``max_error``.
    """
    half = HalfPrecision(plain_copy(original), DTYPES[mode])
    try:
        error = worst(half, calls, expected) if calls else 0.0
    except Exception as failure:
        raise QuantizeError(_fails(half, mode, calls, failure)) from failure
    if error <= max_error:
        return half, error

    def is_off(name: str, inner: list[Arguments]) -> bool:
        module = original.get_submodule(name)
        wanted = [outputs_of(module, call) for call in inner]
        return not worst(HalfPrecision(plain_copy(module), DTYPES[mode]), inner, wanted) <= max_error

    where = first_off(original, calls[:_TRIED], is_off)
    begins = f" It begins in {where}." if where else " No layer alone is off by as much."
    amount = percent(error) if math.isfinite(error) else "more than can be told: infinite, or no numbers"
    raise QuantizeError(
        f"mode={mode!r} has the outputs off by {amount}; allowed is {percent(max_error)}.{begins}"
        + (" 'bf16' has the range of float32." if mode == "fp16" else "")
    )


class _MadeWide(TorchFunctionMode):
    """Records the user's last line that created float32 tensors from others or from nothing."""

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
    except Exception:  # the same failure
        if watched.line:
            said += (
                f" It makes float32 numbers itself, last at {watched.line}: have them in the weights' precision,"
                " .to(self.weight.dtype) say, with a weight of yours, instead of .float()."
            )
    return said
