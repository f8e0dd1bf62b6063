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
from lightning_accel.deploy.inputs import Arguments
from lightning_accel.deploy.losses import is_finite

Convert = Callable[[nn.Module], nn.Module]
"""Makes of a layer in float the same in INT8; the layer stays."""


class MissingPackageError(ImportError):
    """An optional package is not installed; the message says how to install it."""


class _NotFiniteError(Exception):
    """A layer meets NaN or infinite numbers."""


class StaticLayer(nn.Module):
    """A layer whose inputs, weights and outputs are INT8, between tensors in float.

    It is made of one in float with a ``qconfig`` and the observer of its outputs, and of the observer of its inputs.
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


def observed(model: nn.Module, names: list[str], calls: Mapping[int, Arguments]) -> dict[nn.Module, Any]:
    """Layer → observers of its inputs and its outputs, of those that have been called.

    ``calls``: the number of a batch of the calibration data → the call.

    Raises:
        ValueError: A layer takes or returns what is not finite.
    """
    config = _static_config()
    layers = {model.get_submodule(name): name for name in names}
    found: dict[nn.Module, Any] = {}

    def see(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> None:
        if layer not in found:
            found[layer] = config.activation(), config.activation()
        values = (*args, *kwargs.values(), outputs)
        for observer, seen, verb in zip(found[layer], values, ("takes", "returns"), strict=True):
            if not bool(seen.isfinite().all()):
                name = layers[layer]
                raise _NotFiniteError(f"{f'layer {name!r}' if name else 'the model'} {verb} NaN or infinite numbers")
            observer(seen)

    handles = [layer.register_forward_hook(see, with_kwargs=True) for layer in layers]
    try:
        with without_deprecations():
            for number, (args, kwargs) in calls.items():
                try:
                    model(*args, **kwargs)
                except _NotFiniteError as why:
                    whose = "which holds such itself"
                    if is_finite((args, kwargs)):
                        whose = "whose own numbers are finite: the model makes them"
                    more = f"{whose}. INT8 has no range for them: give finite numbers."
                    raise ValueError(f"calibration: {why} on batch {number}, {more}") from None
    finally:
        for handle in handles:
            handle.remove()
    return found


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
            kept[name] = f"{_named(type(module))} has no kernel in {mode}"
        elif getattr(module, "padding_mode", "zeros") != "zeros":
            kept[name] = f"padding_mode={module.padding_mode!r} has no kernel in {mode}"
        else:
            chosen.append(name)
    return chosen, kept


def exchanged(model: nn.Module, by: Mapping[nn.Module, nn.Module]) -> nn.Module:
    """Puts modules in the places of others, at all the names that these have; returns what the model then is."""
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


def _named(kind: type[nn.Module]) -> str:
    """Of torch's own layers the name, of others where they come from too: Hugging Face has a Conv1D."""
    return kind.__name__ if kind.__module__.startswith("torch.nn.") else f"{kind.__module__}.{kind.__qualname__}"


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
