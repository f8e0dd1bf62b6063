"""Whether a form computes what the original does: by the rule of docs/numbers.md; in INT8 by what that loses anyway."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_accel.core.tree import tensors_in
from lightning_accel.deploy.half import HalfPrecision
from lightning_accel.deploy.inputs import Arguments, shapes_in
from lightning_accel.deploy.losses import least_of, loss, outputs_of, worst
from lightning_accel.experiment.trial import Trial
from lightning_accel.experiment.trial_runs import TrialSide

_STATIC_FACTOR, _DYNAMIC_FACTOR = 3.0, 4.0
"""How many times as far as torch's INT8 ONNX Runtime's may be off from the model in float.

With ranges by every call, weights have seven bits instead of eight, which alone loses twice as much; the rest is
chance. Of five untrained models (two convolutions and a linear layer, an MLP, one linear layer, a tied embedding, an
encoder) with 30 to 70 seeds each, most are off by 0.9 to 1.7 times as much as torch's, the worst by 3.5 times. With the
scales of the first or last layer halved, all but the encoder are off by 15 times and more, by 3.7 with static ranges.
"""
_LEAST = 2e-2
"""Of the outputs' norm: what a layer's rounding to seven bits loses, where torch's happened to lose next to nothing."""


def differs(
    original: nn.Module, candidate: Callable[..., Any], calls: list[Arguments], quantized: nn.Module | None = None
) -> tuple[str, float]:
    """How a form's outputs are off on some arguments, in words, empty where they are not; and the largest error.

    A form with INT8 kernels of its own, which round otherwise, is held beside ``quantized``, torch's INT8: one number
    that is rounded the other way moves all that come after, so that two that are both right are as far from each other
    as from the model in float.
    """
    if quantized is not None:
        return _differs_in_int8(original, candidate, calls, quantized)
    half = original.dtype if isinstance(original, HalfPrecision) else None

    def judged(outputs: Any) -> list[Tensor]:
        """Numbers in the precision that they have; whole ones too."""
        found = [t if t.is_floating_point() else t.double() for t in tensors_in(outputs)]
        return [t.to(half) if half and t.dtype == torch.float32 else t for t in found]

    largest = 0.0
    for args, kwargs in calls:
        trial = Trial(original, args, kwargs, with_gradients=False, samples=None, keeps_strides=False, judged=judged)
        found = trial.numbers(TrialSide(original.forward), TrialSide(candidate))
        if found.failure:
            return f"{found.failure}, for inputs of {shapes_in((args, kwargs))}", found.error
        largest = max(largest, found.error)
    return "", largest


def _differs_in_int8(
    original: nn.Module, candidate: Callable[..., Any], calls: list[Arguments], quantized: nn.Module
) -> tuple[str, float]:
    from torch.ao.nn.quantized.dynamic import Linear

    expected = [outputs_of(original, call) for call in calls]
    is_dynamic = any(isinstance(one, Linear) for one in quantized.modules())
    usual = (_DYNAMIC_FACTOR if is_dynamic else _STATIC_FACTOR) * worst(quantized, calls, expected)
    largest = 0.0
    for call, want in zip(calls, expected, strict=True):
        error, allowed = loss(outputs_of(candidate, call), want), max(usual, least_of(want, _LEAST))
        if not error <= allowed:
            of = f"relative error {error:.1e} to the model in float, allowed {allowed:.1e}"
            return f"other numbers: {of}, for inputs of {shapes_in(call)}", error
        largest = max(largest, error)
    return "", largest
