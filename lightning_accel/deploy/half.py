"""A model in half precision that is called as before: what it takes and returns is float32."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_accel.core.tree import map_tensors

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class HalfPrecision(nn.Module):
    """Computes in ``dtype`` between inputs and outputs in float32; the model is converted in place."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.model = model.to(dtype)
        self.dtype = dtype
        set_parameters(self, inspect.signature(model.forward).parameters.values())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = map_tensors(self._narrow, (args, kwargs))
        return map_tensors(self._wide, self.model(*args, **kwargs))

    def _narrow(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.dtype) if tensor.dtype == torch.float32 else tensor

    def _wide(self, tensor: Tensor) -> Tensor:
        return tensor.float() if tensor.dtype == self.dtype else tensor


def set_parameters(wrapper: nn.Module, parameters: Iterable[inspect.Parameter]) -> None:
    """Has a ``forward`` that takes anything say what it takes: exporters name the inputs of a file by that."""
    written: Any = type(wrapper).forward
    forward: Any = FunctionType(written.__code__, written.__globals__, "forward")
    this = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    forward.__signature__ = inspect.Signature([this, *parameters])
    vars(wrapper)["forward"] = MethodType(forward, wrapper)
