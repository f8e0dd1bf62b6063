"""Whether a form computes what the original does: by the rule of docs/numbers.md; in INT8 by what that loses anyway."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_accel.core.module_copies import plain_copy
from lightning_accel.core.tree import tensors_in
from lightning_accel.deploy import int8
from lightning_accel.deploy.half import HalfPrecision
from lightning_accel.deploy.inputs import Arguments, shapes_in
from lightning_accel.deploy.losses import loss, outputs_of, worst
from lightning_accel.experiment.trial import Trial
from lightning_accel.experiment.trial_runs import TrialSide

Judge = Callable[[nn.Module, Callable[..., Any], list[Arguments]], tuple[str, float]]
"""Of a module, a form of it and some arguments: how it is off, in words, empty where it is not; the largest error."""

_STATIC_FACTOR, _DYNAMIC_FACTOR = 3.0, 4.0
"""How many times as far as torch's INT8 ONNX Runtime's may be off from the model in float.

With ranges by every call, weights have seven bits instead of eight, which alone loses twice as much; the rest is
chance. Of five untrained models (two convolutions and a linear layer, an MLP, one linear layer, a tied embedding, an
encoder) with 30 to 70 seeds each, most are off by 0.9 to 1.7 times as much as torch's, the worst by 3.5 times, and by
0.75 of what is allowed; with static ranges three of them by 0.5 to 0.7 times, at worst 2.1. With the scales of the
first or last layer halved, all but the encoder are off by 15 times and more, and by 3.7 with static ranges. (Of an
untrained encoder's query that shows in no output.)
"""
_LEAST = 2e-2
"""Of the outputs' norm: what a layer's rounding to seven bits loses, where torch's happened to lose next to nothing."""


def differs(original: nn.Module, candidate: Callable[..., Any], calls: list[Arguments]) -> tuple[str, float]:
    """How a form's outputs are off on some arguments, in words, empty where they are not; and the largest error."""
    half = original.dtype if isinstance(original, HalfPrecision) else None
    largest = 0.0
    for args, kwargs in calls:
        options: Any = {"with_gradients": False, "samples": None, "keeps_strides": False}
        trial = Trial(original, args, kwargs, **options, judged=lambda out: _judged(out, half))
        found = trial.numbers(TrialSide(original.forward), TrialSide(candidate))
        if found.failure:
            return f"{found.failure}, for inputs of {shapes_in((args, kwargs))}", found.error
        largest = max(largest, found.error)
    return "", largest


def by_what_int8_loses(quantized: nn.Module, original: nn.Module) -> Judge:
    """For a form with INT8 kernels of its own, which round otherwise.

    It may be off from the model in float by a few times what the same layers are off in torch's INT8: one number that
    is rounded the other way moves all that come after, so that two that are both right are as far from each other as
    from the model in float.
    """
    from torch.ao.nn.quantized import dynamic

    in_float = int8.prepare(plain_copy(original))
    named = dict(in_float.named_modules())
    wide = {module: named[name] for name, module in quantized.named_modules() if name in named}

    def judge(module: nn.Module, candidate: Callable[..., Any], calls: list[Arguments]) -> tuple[str, float]:
        expected = [outputs_of(wide[module], call) for call in calls]
        is_dynamic = any(isinstance(one, dynamic.Linear) for one in module.modules())
        factor = _DYNAMIC_FACTOR if is_dynamic else _STATIC_FACTOR
        in_torch = worst(module, calls, expected)
        found = [loss(outputs_of(candidate, call), want) for call, want in zip(calls, expected, strict=True)]
        for call, want, error in zip(calls, expected, found, strict=True):
            allowed = max(factor * in_torch, _least(want))
            if not error <= allowed:
                of = f"relative error {error:.1e} to the model in float, allowed {allowed:.1e}"
                return f"other numbers: {of}, for inputs of {shapes_in(call)}", error
        return "", max(found)

    return judge


def _least(expected: list[Tensor]) -> float:
    """What is let pass in any case; of whole numbers one of each output, as a hair's breadth may decide which it is."""
    return max([_LEAST, *(1 / t.numel() for t in expected if not t.is_floating_point())])


def _judged(outputs: Any, half: torch.dtype | None) -> list[Tensor]:
    """Numbers in the precision that they have; whole ones too."""
    found = [t if t.is_floating_point() else t.double() for t in tensors_in(outputs)]
    return [t.to(half) if half and t.dtype == torch.float32 else t for t in found]
