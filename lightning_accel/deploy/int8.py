"""The layers of a model in INT8, one by one: what can be converted, by which kernels, and with which ranges.

``torch.ao.nn.quantized`` is deprecated, and used all the same: it takes any batch and needs no compiler, where PT2E and
torchao are fast only when compiled, for half a minute and more. benchmarks/deploying.py measures them side by side, and
ONNX Runtime, to which what is made here is exported (:mod:`lightning_accel.deploy.int8_onnx`). For weights alone there
is nothing in torch.ao, and torchao is used.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_accel.core import torchao
from lightning_accel.deploy.attention import SplitAttention, can_split

Convert = Callable[[nn.Module], nn.Module]
"""Makes of a layer in float the same in INT8; the layer stays."""


class MissingPackageError(ImportError):
    """An optional package is not installed; the message says how to install it."""


class StaticLayer(nn.Module):
    """A layer whose inputs, weights and outputs are INT8, between tensors in float.

    Args:
        layer: In float, with a ``qconfig`` and the observer of its outputs.
        inputs: The observer of its inputs.
    """

    def __init__(self, layer: nn.Module, inputs: Any) -> None:
        super().__init__()
        from torch.ao.nn import quantized

        kinds: dict[type[nn.Module], Any] = {
            nn.Linear: quantized.Linear,
            nn.Conv1d: quantized.Conv1d,
            nn.Conv2d: quantized.Conv2d,
        }
        scale, zero_point = inputs.calculate_qparams()
        self.scale, self.zero_point = float(scale), int(zero_point)
        self.layer = kinds[type(layer)].from_float(layer)

    def forward(self, x: Tensor) -> Tensor:
        quantized = torch.quantize_per_tensor(x, self.scale, self.zero_point, torch.quint8)
        result: Tensor = self.layer(quantized).dequantize()
        return result


def dynamic(layer: nn.Module) -> nn.Module:
    """INT8 weights, a range for each output channel; inputs by the range that they have at every call."""
    from torch.ao.nn.quantized.dynamic import Linear
    from torch.ao.quantization import per_channel_dynamic_qconfig

    kind: Any = Linear

    with _on_loan(layer, qconfig=per_channel_dynamic_qconfig), without_deprecations():
        found: nn.Module = kind.from_float(layer)
    return found


def static(ranges: Mapping[nn.Module, tuple[Any, Any]]) -> Convert:
    """INT8 weights, inputs and outputs, by the ranges that :func:`observed` has seen."""

    def convert(layer: nn.Module) -> nn.Module:
        inputs, outputs = ranges[layer]
        with _on_loan(layer, qconfig=_static_config(), activation_post_process=outputs), without_deprecations():
            return StaticLayer(layer, inputs)

    return convert


def weights_only(layer: nn.Module) -> nn.Module:
    """INT8 weights, a range for each output channel, by torchao; all else in float.

    Raises:
        MissingPackageError: torchao is not here.
    """
    if missing := torchao.why_missing("torchao.quantization"):
        raise MissingPackageError(missing)
    quantization = torchao.load("torchao.quantization")
    converted = nn.Linear(layer.in_features, layer.out_features, device="meta")  # type: ignore[arg-type]
    converted.weight = nn.Parameter(layer.weight.detach().clone(), requires_grad=False)  # type: ignore[operator]
    converted.bias = layer.bias  # type: ignore[assignment]
    with without_deprecations():
        quantization.quantize_(converted, quantization.Int8WeightOnlyConfig())
    return converted


def observed(model: nn.Module, names: list[str], run: Callable[[], object]) -> dict[nn.Module, Any]:
    """Layer → observers of its inputs and its outputs, of those that ``run`` has called."""
    config = _static_config()
    with without_deprecations():
        watched = {model.get_submodule(name): (config.activation(), config.activation()) for name in names}
    called: dict[nn.Module, Any] = {}

    def see(layer: nn.Module, inputs: tuple[Any, ...], outputs: Any) -> None:
        called[layer] = watched[layer]
        for observer, seen in zip(watched[layer], (inputs[0], outputs), strict=True):
            observer(seen)

    handles = [layer.register_forward_hook(see) for layer in watched]
    try:
        with without_deprecations():
            run()
    finally:
        for handle in handles:
            handle.remove()
    return called


def prepare(model: nn.Module) -> nn.Module:
    """Makes a model's layers accessible in place: attention is split, and fused forms that read weights are off."""
    split: dict[nn.Module, nn.Module] = {}
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention) and can_split(module):
            split[module] = SplitAttention(module)
        elif isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0  # its fused form takes weights in float
        elif isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = module.enable_nested_tensor = False
    return exchanged(model, split)


def choose(model: nn.Module, mode: str) -> tuple[list[str], dict[str, str]]:
    """The names of the layers that can be converted, and of the others that hold matrices, why they cannot."""
    kinds = (nn.Linear, nn.Conv1d, nn.Conv2d) if mode == "int8-static" else (nn.Linear,)
    chosen, kept = [], {}
    for name, module in model.named_modules():
        if not any(p.dim() > 1 for p in module.parameters(recurse=False)):
            continue
        if type(module) not in kinds:
            kept[name] = f"{type(module).__name__} has no kernel in {mode}"
        elif getattr(module, "padding_mode", "zeros") != "zeros":
            kept[name] = f"padding_mode={module.padding_mode!r} has no kernel in {mode}"
        else:
            chosen.append(name)
    return chosen, kept


def exchanged(model: nn.Module, by: Mapping[nn.Module, nn.Module]) -> nn.Module:
    """Puts modules in the places of others, in place, at all the names that these have; returns what ``model`` is then."""
    for path, module in list(model.named_modules(remove_duplicate=False)):
        if path and module in by:
            owner, _, name = path.rpartition(".")
            setattr(model.get_submodule(owner), name, by[module])
    return by.get(model, model)


@contextmanager
def without_deprecations() -> Iterator[None]:
    """Inside, torch and torchao do not warn of what this module has chosen knowingly."""
    with warnings.catch_warnings():
        for kind in (UserWarning, DeprecationWarning, FutureWarning):
            warnings.simplefilter("ignore", kind)
        yield


@contextmanager
def _on_loan(layer: nn.Module, **attributes: Any) -> Iterator[None]:
    for name, value in attributes.items():
        setattr(layer, name, value)
    try:
        yield
    finally:
        for name in attributes:
            delattr(layer, name)


def _static_config() -> Any:
    from torch.ao import quantization

    make: Any = quantization.get_default_qconfig
    with without_deprecations():
        return make(torch.backends.quantized.engine)
