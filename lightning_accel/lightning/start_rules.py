"""Rules that decide from the plan and the Trainer's limits whether a fit begins as the user wrote it."""

from __future__ import annotations

import math

import torch
from torch import nn

from lightning_accel.core.report import Report
from lightning_accel.lightning.batch_transfer import takes_loader
from lightning_accel.lightning.met_programs import Program
from lightning_accel.lightning.packages import ParallelStrategy, Strategy, Trainer, TrainerFn
from lightning_accel.memory.oom_report import own_limits
from lightning_accel.settings import Plan
from lightning_accel.techniques.registry import declarations

SHORT_ON_RANKS = 100
"""Optimizer steps. A run of several ranks with fewer steps is accelerated only if the user asks for it by name."""

_WAITS = "waiting for plain steps that tell what it may cost"


def _asks_by_name(plan: Plan) -> bool:
    """Returns whether a plan requests by name something that must act from the first step on."""
    return plan.on_oom == "split" or any(
        not (value == declaration.default or declaration.is_off(value))
        for (name, declaration), value in zip(declarations().items(), plan.settings().values(), strict=True)
        if name != "precision"  # needs no edits
    )


def begins_plain(program: Program, precision: str) -> bool:
    """Returns whether a run begins as the user wrote it.

    It does not if its plan requests something by name, if time measurements may not decide, or if a technique that
    fails is an error. On several ranks, layouts must be known before the first step: only a run that is known to be
    short stays plain there, from start to end.
    """
    plan, trainer = program.plan, program.module.trainer
    strategy: Strategy = trainer.strategy
    by_clock = plan.trust == "measured" and not torch.are_deterministic_algorithms_enabled()
    is_new = trainer.ckpt_path is None and not program.kept.is_decided
    is_to_stay = is_rehearsal(trainer) or (is_new and _is_short_on_every_rank(trainer))
    is_alone = not isinstance(strategy, ParallelStrategy) or is_to_stay
    has_scaler = precision == "16-mixed" and plan.of("precision") == "auto"  # a scaler changes the kind of a step
    feeds = getattr(strategy, "wants_pipeline", False) and program.host.kind != "cpu"
    # A step that reads the loader directly has no moment at which the plan could start.
    is_plain = by_clock and is_alone and not (plan.strict or has_scaler or feeds or takes_loader(trainer))
    return is_plain and not _asks_by_name(plan)


def is_rehearsal(trainer: Trainer) -> bool:
    """Returns whether a fit is a check (``fast_dev_run``, ``overfit_batches``) and not a training."""
    return bool(trainer.fast_dev_run or trainer.overfit_batches)  # type: ignore[attr-defined]


def _is_short_on_every_rank(trainer: Trainer) -> bool:
    """Returns whether a fit is short by the Trainer's own limits, which are the same on every rank."""
    limit, epochs, accumulated = trainer.limit_train_batches, trainer.max_epochs or -1, trainer.accumulate_grad_batches
    turns = epochs * -(-limit // accumulated) if isinstance(limit, int) and epochs != -1 else math.inf
    turns = turns if trainer.max_steps == -1 else min(turns, trainer.max_steps)
    return trainer.state.fn == TrainerFn.FITTING and turns < SHORT_ON_RANKS


def plain_report(program: Program, precision: str) -> Report:
    """Returns the report of a run that begins as the user wrote it."""
    report = Report(declarations(), device=program.host.described)
    for name in declarations():
        if not program.plan.is_off(name):
            report.of(name).change("waiting", _WAITS)
    if program.plan.of("precision") != "auto":
        report.of("precision").change("decided", f"{precision}: as asked", is_on=precision != "32-true")
    return report


def own_format(module: nn.Module) -> str:
    """Describes the first 16-bit parameter or buffer, which rules out a format of our choice; empty if none."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.dtype in (torch.float16, torch.bfloat16):
            return f"{name} in {str(tensor.dtype).removeprefix('torch.')}"
    return ""


def may_lack_memory(device: torch.device) -> bool:
    """Returns whether a lack of memory is an error here. On a CPU without its own limit, the kernel acts instead."""
    return device.type != "cpu" or bool(own_limits())
