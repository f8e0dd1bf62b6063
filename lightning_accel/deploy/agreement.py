"""Checks whether a form computes what the original does: by docs/numbers.md; for INT8 by its usual loss."""

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
"""Limits of an INT8 form's error in ONNX Runtime, as multiples of the error of torch's INT8 from the float model.

With dynamic ranges, weights have seven bits instead of eight, which alone doubles the error; the rest is chance. The
limits come from five untrained models (two convolutions and a linear layer, an MLP, one linear layer, a tied embedding,
an encoder) with 30 to 70 seeds each. Most errors are 0.9 to 1.7 times torch's, the worst is 3.5 times. With halved
scales in the first or last layer, all but the encoder reach 15 times and more, 3.7 with static ranges.
"""
_LEAST = 2e-2
"""Least limit, as a share of the outputs' norm: rounding a layer to seven bits, if torch's error happens to be tiny."""


def differs(
    original: nn.Module, candidate: Callable[..., Any], calls: list[Arguments], quantized: nn.Module | None = None
) -> tuple[str, float]:
    """Returns how a form's outputs differ on some arguments, in words, empty if they do not, and the largest error.

    A form with its own INT8 kernels rounds differently and is compared with ``quantized``, torch's INT8. One number
    that is rounded the other way changes all later ones, so two correct forms may differ from each other as much as
    from the float model.
    """
    if quantized is not None:
        return _differs_in_int8(original, candidate, calls, quantized)
    half = original.dtype if isinstance(original, HalfPrecision) else None

    def judged(outputs: Any) -> list[Tensor]:
        """Converts outputs to the precision that they really have, and integers to float."""
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
