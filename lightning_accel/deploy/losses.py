"""The error of outputs: the norm of the difference; for integer outputs alone, the share that differs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_accel.core.tree import tensors_in
from lightning_accel.deploy.inputs import Arguments
from lightning_accel.experiment.tolerance import deviation


def outputs_of(model: Callable[..., Any], call: Arguments) -> list[Tensor]:
    """Returns the tensors of a model's outputs that are compared."""
    return compared(model(*call[0], **call[1]))


def compared(outputs: Any) -> list[Tensor]:
    """Returns the floating-point outputs, or the integer ones if there are no others."""
    tensors = [torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in tensors_in(outputs)]
    tensors = [t for t in tensors if t.numel()]
    return [t for t in tensors if t.is_floating_point()] or tensors


def loss(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Returns the error of outputs: 0 if they are equal, infinity if shapes differ."""
    if [t.shape for t in found] != [t.shape for t in expected]:
        return math.inf
    if all(t.is_floating_point() for t in expected):
        return deviation(found, expected).noise
    return max(float((a != b).double().mean()) for a, b in zip(found, expected, strict=True))


def worst(model: Callable[..., Any], calls: Sequence[Arguments], expected: Sequence[Sequence[Tensor]]) -> float:
    """Returns the largest loss of all calls."""
    return max(loss(outputs_of(model, call), want) for call, want in zip(calls, expected, strict=True))


def measure_of(expected: Sequence[Sequence[Tensor]]) -> str:
    """Returns what a loss is a share of, in words; empty if the outputs have nothing to measure against."""
    tensors = [t for outputs in expected for t in outputs]
    if not any(bool(torch.isfinite(t).any()) for t in tensors):
        return ""
    is_float = any(t.is_floating_point() for t in tensors)
    return "of the outputs' norm" if is_float else "of the outputs, in whole numbers"


def least_of(outputs: Sequence[Tensor], least: float) -> float:
    """Returns the error that is always allowed. For integers: one element per output, since rounding may flip it."""
    return max([least, *(1 / t.numel() for t in outputs if not t.is_floating_point())])


def is_finite(data: Any) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in tensors_in(data))


def percent(share: float) -> str:
    """Formats a share with three significant digits: ``5%``, ``0.0213%``."""
    return f"{100 * share:.3g}%"
