"""Layers in INT8 as ONNX has them: the same weights and ranges, for the kernels of whatever reads ONNX.

Operators of ONNX stand in the graph where torch.ao has kernels of its own (``torch.onnx.ops.symbolic``): ONNX Runtime
makes one kernel of each layer, quantising its inputs included. Run by torch these modules compute nothing.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_accel.deploy.int8 import StaticLayer, exchanged, without_deprecations

_VERSION = 18  # of ONNX's operators


class Linear(nn.Module):
    """A linear layer, of which inputs are quantised by the range that they have at every call, or a given one.

    It is made of one of ``torch.ao.nn.quantized`` or its ``dynamic``, with a range for each output channel. A given
    range of ``inputs`` is a scale and a zero point.
    """

    codes: Tensor
    scales: Tensor
    zero: Tensor

    def __init__(self, layer: nn.Module, inputs: tuple[float, int] | None = None) -> None:
        super().__init__()
        weight, self.bias = _weight_and_bias(layer)
        codes, scales = weight.int_repr(), weight.q_per_channel_scales().float()
        if inputs is None:
            # Of 7 bits, as inputs take all 8 (torch.ao has it the other way round):
            # kernels for processors without VNNI add two products in 16 bits, and saturate beyond
            # (https://onnxruntime.ai/docs/performance/model-optimizations/quantization.html).
            codes, scales = (codes.float() / 2).round().clamp(-64, 63).to(torch.int8), 2 * scales
        self.register_buffer("codes", codes.t().contiguous())
        self.register_buffer("zero", torch.tensor(0, dtype=torch.int8))
        self.register_buffer("scales", scales)
        self.inputs = None if inputs is None else _Range(*inputs)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) → (..., out)."""
        codes, scale, zero = _by_own_range(x) if self.inputs is None else self.inputs.codes(x)
        shape = (*x.shape[:-1], self.codes.shape[1])
        sums = _symbolic("MatMulInteger", (codes, self.codes, zero, self.zero), torch.int32, shape)
        result = sums.float() * (scale * self.scales)
        return result if self.bias is None else result + self.bias


class StaticConv(nn.Module):
    """A convolution of which inputs and outputs are quantised by the ranges of the calibration data."""

    def __init__(self, layer: StaticLayer) -> None:
        super().__init__()
        made: Any = layer.layer
        weight, bias = _weight_and_bias(made)
        scales = weight.q_per_channel_scales().float()
        self.inputs, self.outputs = _Range(layer.scale, layer.zero_point), _Range(made.scale, made.zero_point)
        self.weight = _Codes(weight.int_repr(), scales, axis=0)
        self.bias = None
        if bias is not None:  # in whole steps of the products that it is added to
            steps = scales * layer.scale
            self.bias = _Codes((bias / steps).round().to(torch.int32), steps, axis=0)
        self._convolve = {3: F.conv1d, 4: F.conv2d}[weight.dim()]
        self._options = {"stride": made.stride, "padding": made.padding, "dilation": made.dilation}
        self._groups = made.groups

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, ...) → (B, C', ...)."""
        bias = None if self.bias is None else self.bias()
        found = self._convolve(self.inputs(x), self.weight(), bias, groups=self._groups, **self._options)
        result: Tensor = self.outputs(found)
        return result


class _Range(nn.Module):
    """Rounds to the steps of a range: what ONNX Runtime takes into the kernel of the layer beside it."""

    scale: Tensor
    zero: Tensor

    def __init__(self, scale: float, zero_point: int) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(float(scale)))
        self.register_buffer("zero", torch.tensor(int(zero_point), dtype=torch.uint8))

    def forward(self, x: Tensor) -> Tensor:
        return _symbolic("DequantizeLinear", self.codes(x), torch.float32, x.shape)

    def codes(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Whole numbers, their step and which of them is zero."""
        return _symbolic("QuantizeLinear", (x, self.scale, self.zero), torch.uint8, x.shape), self.scale, self.zero


class _Codes(nn.Module):
    """Numbers that are stored as whole ones, with a step for each channel."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor

    def __init__(self, codes: Tensor, scales: Tensor, axis: int) -> None:
        super().__init__()
        self.register_buffer("codes", codes)
        self.register_buffer("scales", scales)
        self.register_buffer("zeros", torch.zeros(len(scales), dtype=codes.dtype))
        self._axis = axis

    def forward(self) -> Tensor:
        arguments = (self.codes, self.scales, self.zeros)
        return _symbolic("DequantizeLinear", arguments, torch.float32, self.codes.shape, axis=self._axis)


def in_onnx(model: nn.Module) -> nn.Module:
    """A copy with ONNX's operators in place of layers in INT8; the model itself where it has none."""
    from torch.ao.nn.quantized import dynamic

    kinds = (dynamic.Linear, StaticLayer)
    if not any(isinstance(module, kinds) for module in model.modules()):
        return model
    with torch.no_grad(), without_deprecations():
        copied = copy.deepcopy(model)
        found: dict[nn.Module, nn.Module] = {
            module: _converted(module) for module in copied.modules() if isinstance(module, kinds)
        }
        return exchanged(copied, found).eval()


def _converted(layer: nn.Module) -> nn.Module:
    if not isinstance(layer, StaticLayer):
        return Linear(layer)
    is_linear = _weight_and_bias(layer.layer)[0].dim() == 2
    return Linear(layer.layer, (layer.scale, layer.zero_point)) if is_linear else StaticConv(layer)


def _by_own_range(x: Tensor) -> tuple[Tensor, ...]:
    return tuple(
        torch.onnx.ops.symbolic_multi_out(
            "DynamicQuantizeLinear",
            (x,),
            dtypes=(torch.uint8, torch.float32, torch.uint8),
            shapes=(x.shape, (), ()),
            version=_VERSION,
        )
    )


def _weight_and_bias(layer: Any) -> tuple[Any, Tensor | None]:
    bias = layer.bias()
    return layer.weight(), None if bias is None else bias.detach().float()


def _symbolic(name: str, arguments: tuple[Tensor, ...], dtype: torch.dtype, shape: Any, **attributes: Any) -> Tensor:
    return torch.onnx.ops.symbolic(name, arguments, attributes, dtype=dtype, shape=shape, version=_VERSION)
