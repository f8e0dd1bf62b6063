"""Linear layers in 8-bit floating point, by torchao: https://github.com/pytorch/ao/tree/main/torchao/float8.

Micikevicius et al., "FP8 Formats for Deep Learning" (2022), https://arxiv.org/abs/2209.05433.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized
from typing_extensions import override

from lightning_accel.core.compiled import is_inside_compiled
from lightning_accel.core.host import Host
from lightning_accel.core.isolation import isolated
from lightning_accel.core.measured import Measurement, together
from lightning_accel.core.patch import MethodPatch, Patch, applied
from lightning_accel.core.report import one_line
from lightning_accel.core.torch_private.compilation import compiled_alone
from lightning_accel.core.torchao import load, why_missing
from lightning_accel.core.tree import tensors_in
from lightning_accel.experiment.passes import Passes
from lightning_accel.experiment.screening import screen
from lightning_accel.experiment.trial import Trial
from lightning_accel.experiment.trial_runs import TrialSide
from lightning_accel.techniques.base import BuildContext, Technique, Traits
from lightning_accel.techniques.registry import register
from lightning_accel.techniques.site import Site
from lightning_accel.techniques.technique_context import Forecast, SiteTrial, Verdict

Float8Setting = Literal["off", "tensorwise", "rowwise", "rowwise_with_gw_hp"]

MODULE = "torchao.float8"
MULTIPLE = 16
"""Of which both sides of a product, and the sum between them, have to be a multiple for the kernels."""


class _Layer:
    """What torchao's forward pass asks of its own layer, with the parameters of another."""

    def __init__(self, layer: nn.Module, config: Any, linear_mm_config: Any) -> None:
        self.weight, self.bias = layer.weight, layer.bias
        self.config, self.linear_mm_config = config, linear_mm_config


class Float8Patch(MethodPatch):
    """Has a linear layer compute as torchao's ``Float8Linear`` does, and stay the layer that it is.

    In training only, so that an evaluation gives what the checkpoint gives anywhere else; batches whose rows are not a
    multiple of 16 run as they would have.
    """

    def __init__(self, site: str, layer: nn.Linear, config: Any) -> None:
        super().__init__(site, "linear → float8", layer, "forward", self._in_float8)
        self.layer = layer
        self._config = config

    def _in_float8(self, original: Callable[..., Any]) -> Callable[..., Any]:
        # Made by torchao's own function, which shares the parameters and leaves the layer itself alone.
        twin = load(MODULE).convert_to_float8_training(self.layer, config=self._config)
        compute, config, linear_mm_config = type(twin).forward, twin.config, twin.linear_mm_config

        def forward(self: nn.Linear, input: Tensor) -> Tensor:
            if not self.training or input.numel() // self.in_features % MULTIPLE or not input.numel():
                return original(self, input)  # type: ignore[no-any-return]
            layer, kind = _Layer(self, config, linear_mm_config), input.device.type
            if not torch.is_autocast_enabled(kind):
                return compute(layer, input)  # type: ignore[no-any-return]
            # torchao asks for the dtype of autocast by a name that torch has deprecated.
            with torch.autocast(kind, enabled=False):
                return compute(layer, input.to(torch.get_autocast_dtype(kind)))  # type: ignore[no-any-return]

        return forward


def float8_patches(model: nn.Module, recipe: str, *, emulate: bool) -> Iterator[Patch]:
    """The linear layers of ``model`` that could multiply in 8-bit floating point, and why others could not.

    To ``emulate`` is to compute in float32 what a card would compute, for machines that have none.
    """
    config = configuration(recipe, emulate=emulate)
    for site, module in model.named_modules():
        if isinstance(module, nn.Linear):
            reason = _why_not(module) or ("inside a compiled module" if is_inside_compiled(model, site) else "")
            yield Site(site, why_not=reason) if reason else Float8Patch(site, module, config)


def configuration(recipe: str, *, emulate: bool = False) -> Any:
    """The configuration that torchao has for a recipe."""
    return replace(load(MODULE).Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)


def _why_not(layer: nn.Linear) -> str:
    if is_lazy(layer.weight):
        return "its weight is lazy: run the model once before"
    if type(layer).forward is not nn.Linear.forward or "forward" in vars(layer):
        return f"a {type(layer).__name__} with a forward of its own"
    if is_parametrized(layer):
        return "its weight is computed by a parametrization"
    if type(layer.weight) not in (nn.Parameter, Tensor) or not layer.weight.is_floating_point():
        return f"its weight is a {type(layer.weight).__name__} of {layer.weight.dtype}"
    if layer.in_features % MULTIPLE or layer.out_features % MULTIPLE:
        return f"{layer.in_features} x {layer.out_features} are not both multiples of {MULTIPLE}"
    return ""


def bounds(config: Any) -> tuple[float, float]:
    """How far an output and a gradient may be off, relative and in the norm.

    As far as if every element of both factors were rounded by as much as its format rounds at most, half of its
    ``eps``, each in a direction of its own: what is further off has lost values to the scale that its tensor shares.
    """
    of_values, of_gradients = (
        torch.finfo(cast.target_dtype).eps / 2 for cast in (config.cast_config_input, config.cast_config_grad_output)
    )
    return 2**0.5 * of_values, (of_values**2 + of_gradients**2) ** 0.5


@register(
    "float8",
    options=Float8Setting,
    default="off",
    doc=(
        '``"off"``; or one of torchao\'s: ``"tensorwise"``, a scale a tensor, the fastest; ``"rowwise"``, a '
        'scale a row; ``"rowwise_with_gw_hp"``, which leaves the gradients of weights out, the most exact. It '
        "changes training: only layers that run faster use float8 while they train, and the report says what each "
        "is off by."
    ),
    after=("flash_attention", "inplace_activations"),
    before=("gradient_checkpointing", "compile"),
    exactness="changes training",
)
class Float8(Technique):
    """Linear layers in 8-bit floating point, each where that is faster and no further off than its formats explain.

    They are timed compiled where blocks will be.
    """

    traits = Traits(
        remembers=False,
        why_not_sharded="a layer's trial needs its whole weight",
        lacks=lambda host: why_missing(MODULE),
    )

    def __init__(self, recipe: str, context: BuildContext | None = None, *, emulate: bool = False) -> None:
        self._recipe, self._emulate = recipe, emulate
        self._is_compiled = context is not None and context.settings["compile"] != "off"
        words = "each linear layer is tried on the first batch, where torchao is installed"
        self.run.forecast = Forecast(True, "tried", words)
        self._speeds: dict[Any, Verdict] = {}  # of layers and inputs of one size, which are timed once

    @override
    def unavailable(self, host: Host) -> str | None:
        if self._emulate or (host.kind == "cuda" and host.capability is not None and host.capability >= (8, 9)):
            return None
        if host.kind == "rocm":
            return "not measured on AMD's cards"
        return f"{host.device_name} has no 8-bit floating point: it came with compute capability 8.9 of NVIDIA's cards"

    @override
    def sites(self, model: nn.Module, host: Host) -> Iterator[Patch]:
        for patch in float8_patches(model, self._recipe, emulate=self._emulate):
            if isinstance(patch, Float8Patch):
                self.run.trials[patch.site] = SiteTrial(
                    patch.layer,
                    functools.partial(self._try, patch),
                    when=functools.partial(getattr, patch.layer, "training"),
                    unseen="not called in training on the first step, so not tried",
                )
            yield patch

    def _try(self, patch: Float8Patch, args: Any, kwargs: dict[str, Any]) -> Verdict:
        [tensor] = tensors_in((args, kwargs))
        layer = patch.layer
        rows = tensor.numel() // layer.in_features
        if rows % MULTIPLE or not rows:
            return Verdict("refused", f"its input has {rows} rows, not a multiple of {MULTIPLE}")
        try:
            errors = self._errors(patch, args, kwargs)
        except Exception as error:
            return Verdict("failed", f"failed in its trial: {one_line(error)}")
        limits = bounds(configuration(self._recipe))
        # The one of the two that is nearer to what its format explains.
        worst, limit = max(zip(errors, limits, strict=True), key=lambda pair: pair[0] / pair[1])
        measured = Measurement(error=worst, spread=limit, is_same=False)
        off = f"output off by {errors[0]:.1%}, gradients by {errors[1]:.1%}"
        if not all(error <= limit for error, limit in zip(errors, limits, strict=True)):
            reason = f"{off}, where its formats round by {limits[0]:.1%} and {limits[1]:.1%}"
            return Verdict("refused", reason, measured=measured)
        if not self.run.decides_by_clock:
            return Verdict("kept", off, measured=measured)
        size = (rows, *layer.weight.shape, layer.bias is None, tensor.dtype, layer.weight.dtype, tensor.requires_grad)
        if size not in self._speeds:
            self._speeds[size] = self._speed(patch, args, kwargs)
        speed = self._speeds[size]
        return replace(
            speed, reason=f"{speed.reason}; {off}", measured=together(filter(None, [measured, speed.measured]))
        )

    def _errors(self, patch: Float8Patch, args: Any, kwargs: dict[str, Any]) -> tuple[float, float]:
        """How far the output, and the gradient that is furthest off, are from the layer's own."""
        layer = patch.layer
        passes = Passes(layer, with_gradients=torch.is_grad_enabled())
        with isolated(layer):
            expected = passes.results(layer.forward, args, kwargs)
            with applied(patch):
                found = passes.results(layer.forward, args, kwargs)
        off = [_relative(actual, plain) for actual, plain in zip(found, expected, strict=True)]
        return off[0], max(off[1:], default=0.0)

    def _speed(self, patch: Float8Patch, args: Any, kwargs: dict[str, Any]) -> Verdict:
        with applied(patch):
            functions = patch.original, patch.value.__func__
        sides: list[Callable[..., Any]] = [functools.partial(function, patch.layer) for function in functions]
        trial = Trial(patch.layer, args, kwargs, with_gradients=torch.is_grad_enabled())
        if self._is_compiled:  # as the blocks will be: by themselves, the casts take longer than most products gain
            sides = [compiled_alone(side) for side in sides]
            trial.numbers(*map(TrialSide, sides), in_other_orders=False)  # whose first pass compiles
        found = trial.time(*map(TrialSide, sides))
        if found.original_ms is None or found.candidate_ms is None:
            return Verdict(found.kind, found.failure)
        before, after = found.original_ms, found.candidate_ms
        words = f"{before / after:.2f}x the speed here ({before:.2f} → {after:.2f} ms)"
        return Verdict("kept" if screen(before, after) == "faster" else "refused", words, measured=found.measured())


def _relative(actual: Tensor, plain: Tensor) -> float:
    error, norm = (float(tensor.double().norm()) for tensor in (actual.double() - plain.double(), plain))
    return error / norm if norm else (0.0 if error == 0 else float("inf"))  # of a layer that begins with zeros, say
