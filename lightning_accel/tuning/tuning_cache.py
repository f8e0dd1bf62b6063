"""The cache of settled live trials, for later runs of the same model on the same machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from lightning_accel.core.package_version import own_version
from lightning_accel.core.tree import tensors_in
from lightning_accel.experiment.digest import digest
from lightning_accel.experiment.store import Store
from lightning_accel.techniques.arms import Arm
from lightning_accel.tuning.tuning_result import Tuning

TUNINGS = Store("tuning", lambda found: replace(Tuning.from_dict(found), is_earlier=True))
"""The settled trials, by :func:`run_key`."""


def run_key(model: nn.Module, batch: Any, host: str, arms: Sequence[Arm] = ()) -> dict[str, str]:
    """Returns the key of a run: parameters, batch shapes up to the next power of two, machine, versions, arms."""
    shapes = [[(size - 1).bit_length() for size in t.shape] for t in tensors_in(batch) if not t.is_nested]
    return {
        "model": f"{type(model).__qualname__} {digest(parameters_of(model))}",
        "batch": repr(shapes),
        "host": host,
        "versions": f"torch {torch.__version__}, {own_version()}",
        "arms": ", ".join(sorted(f"{arm.name}={'|'.join(arm.choices)}" for arm in arms)),
    }


def parameters_of(model: nn.Module) -> list[tuple[Any, ...]]:
    """Returns the parameters' names, shapes, dtypes and whether each needs a gradient."""
    return [(name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in model.named_parameters()]
