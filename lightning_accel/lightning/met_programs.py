"""What this process knows of the programs that it has trained before, kept in memory until the process ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from lightning_accel.lightning.packages import LightningModule
from lightning_accel.settings import Plan
from lightning_accel.tuning.tuning_result import Tuning

_MOST = 256  # programs; then all of them are forgotten


@dataclass
class Met:
    """What is known of one program.

    Attributes:
        held: What its module held before its first step, in words, and the shapes of its first batch.
        step_s: Seconds that a plain step took.
        opening_s: Seconds that it took to put the plan to work; 0.0 if the run was over before.
        tuning: What live trials have settled.
    """

    held: tuple[str, Any]
    step_s: float
    opening_s: float = 0.0
    tuning: Tuning | None = None


PROGRAMS: dict[Any, Met] = {}
"""By :func:`signature_of`."""


def signature_of(module: LightningModule, plan: Plan) -> Any:
    """What tells a program from others of this process, at nearly no cost: classes, parameters, plan."""
    if len(PROGRAMS) > _MOST:
        PROGRAMS.clear()
    kinds = tuple(type(part) for part in module.modules())
    shapes = tuple((p.shape, p.dtype) for p in module.parameters() if not torch.nn.parameter.is_lazy(p))
    trainer = module.trainer
    terms = torch.get_num_threads(), module.device, type(trainer.strategy), trainer.accumulate_grad_batches
    return kinds, shapes, terms, plan
