"""Converts single layers of a model to INT8: which layers can be converted, and with which ranges.

``torch.ao`` is deprecated but still used: it accepts any batch and needs no compiler. PT2E and torchao are fast only
when compiled, which takes half a minute and more. benchmarks/deploying.py measures them side by side. ``torch.ao`` has
no weight-only mode; torchao is used for that.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_accel.core import torchao
from lightning_accel.core.module_copies import exchanged
from lightning_accel.deploy.attention import SplitAttention, can_split
from lightning_accel.deploy.errors import MissingPackageError
from lightning_accel.deploy.inputs import Arguments
from lightning_accel.deploy.losses import is_finite


class _NotFiniteError(Exception):
    """A layer takes or returns NaN or infinity."""


def dynamic(layer: nn.Module) -> nn.Module:
    """Converts to INT8 weights with a range per output channel. Inputs are quantised by their range in each call."""
    ao: Any = torch.ao.quantization
    made: nn.Sequential = ao.quantize_dynamic(nn.Sequential(layer), {nn.Linear: ao.per_channel_dynamic_qconfig})
    return made[0]


def static(observed_layer: nn.Module) -> nn.Module:
    """Converts to INT8 weights, inputs and outputs, by the ranges recorded in :func:`observed`."""
    ao: Any = torch.ao.quantization
    made: nn.Module = ao.convert(observed_layer, inplace=True)
    return made


def weights_only(layer: nn.Module) -> nn.Module:
    """Converts to INT8 weights with a range per output channel, by torchao. All else stays float.

    Raises:
        MissingPackageError: torchao is not installed.
    """
    if missing := torchao.why_missing("torchao.quantization"):
        raise MissingPackageError(missing)
    quantization = torchao.load("torchao.quantization")
    converted = copy.deepcopy(layer).requires_grad_(False)
    quantization.quantize_(converted, quantization.Int8WeightOnlyConfig())
    return converted


def is_converted(module: nn.Module) -> bool:
    """Returns whether :func:`dynamic` or :func:`static` made the module."""
    from torch.ao.nn.quantized.dynamic import Linear

    return isinstance(module, Linear | torch.ao.quantization.QuantWrapper)


def observed(model: nn.Module, names: list[str], calls: Mapping[int, Arguments]) -> dict[str, nn.Module]:
    """Returns layer name → a copy that has observed the layer's inputs and outputs, for layers that were called.

    ``calls`` maps the number of a calibration batch to the call.

    Raises:
        ValueError: A layer takes or returns NaN or infinity.
    """
    copies = {name: _with_observers(model.get_submodule(name)) for name in names}
    found: dict[str, nn.Module] = {}

    def see(name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> None:
        values = (*args, *kwargs.values(), outputs)
        for seen, verb in zip(values, ("takes", "returns"), strict=True):
            if not bool(seen.isfinite().all()):
                raise _NotFiniteError(f"{f'layer {name!r}' if name else 'the model'} {verb} NaN or infinite numbers")
        found[name] = copies[name]
        copies[name].quant.activation_post_process(values[0])
        copies[name].module.activation_post_process(values[1])

    with ExitStack() as hooks:
        for name in names:
            layer = model.get_submodule(name)
            hooks.enter_context(layer.register_forward_hook(partial(see, name), with_kwargs=True))
        for number, (args, kwargs) in calls.items():
            try:
                model(*args, **kwargs)
            except _NotFiniteError as why:
                is_models = is_finite((args, kwargs))
                whose = "whose own numbers are finite: the model makes them" if is_models else "which holds such itself"
                raise ValueError(
                    f"calibration: {why} on batch {number}, {whose}. INT8 has no range for them: give finite numbers."
                ) from None
    return found


def prepare(model: nn.Module) -> nn.Module:
    """Makes a model's layers accessible in place: splits attention, and disables fused forms that read weights."""
    split: dict[nn.Module, nn.Module] = {}
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention) and can_split(module):
            split[module] = SplitAttention(module)
        elif isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0  # its fused form needs float weights
        elif isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = module.enable_nested_tensor = False
    return exchanged(model, split)


def choose(model: nn.Module, mode: str) -> tuple[list[str], dict[str, str]]:
    """Returns the names of layers that can be converted, and name → why not for other layers with matrices."""
    kinds = (nn.Linear, nn.Conv1d, nn.Conv2d) if mode == "int8-static" else (nn.Linear,)
    chosen, kept = [], {}
    for name, module in model.named_modules():
        if not any(p.dim() > 1 for p in module.parameters(recurse=False)):
            continue
        kind = type(module)
        if kind not in kinds:
            # Full names outside torch: Hugging Face has a Conv1D too.
            full = (
                kind.__name__ if kind.__module__.startswith("torch.nn.") else f"{kind.__module__}.{kind.__qualname__}"
            )
            kept[name] = f"{full} has no kernel in {mode}"
        elif getattr(module, "padding_mode", "zeros") != "zeros":
            kept[name] = f"padding_mode={module.padding_mode!r} has no kernel in {mode}"
        else:
            chosen.append(name)
    return chosen, kept


@contextmanager
def without_deprecations() -> Iterator[None]:
    """Suppresses torch's and torchao's warnings about what this module uses deliberately."""
    with warnings.catch_warnings():
        for kind in (UserWarning, DeprecationWarning, FutureWarning):
            warnings.simplefilter("ignore", kind)
        yield


def _with_observers(layer: nn.Module) -> Any:
    ao: Any = torch.ao.quantization
    copied = ao.QuantWrapper(copy.deepcopy(layer)).eval()
    copied.qconfig = ao.get_default_qconfig(torch.backends.quantized.engine)
    return ao.prepare(copied, inplace=True)
