"""The error page of a run that ends without memory, made from the run's state and its attempts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml

from lightning_accel.assembly import NamedFallback
from lightning_accel.core.tree import tensors_in
from lightning_accel.lightning.run_engine import RunEngine
from lightning_accel.lightning.split_batches import SplitBatches
from lightning_accel.memory.inventory import Inventory
from lightning_accel.memory.oom_report import Remedy, StepMemoryError, error_with, page

OPTIMIZER = "optimizer's step"
_TRAINING = ("forward pass", "backward pass", OPTIMIZER)
_OF_OTHERS = (
    "several processes train together, and one of them cannot run a step again alone. Restart all of them with other"
    " settings"
)


def ending_error(
    cause: Exception,
    within: str,
    asked: str,
    inventory: Inventory,
    *,
    engine: RunEngine,
    batch: Any,
    why: str,
    put_on: Sequence[NamedFallback],
    left: Sequence[NamedFallback],
    split: SplitBatches | None,
    may_split: bool,
) -> StepMemoryError:
    """Returns the error that ends a run whose step has run out of memory, with the page as its message.

    Args:
        cause: The original error.
        within: The part of the step that raised it.
        asked: Who asked for memory.
        inventory: Who held it.
        engine: The run's engine.
        batch: The batch of the step.
        why: Why the step could not run again; empty if it was not tried.
        put_on: The fallbacks that were put on.
        left: Those that remain.
        split: The split batches; None if the user has not requested them.
        may_split: Whether half batches might have passed the step.
    """
    trainer = engine.module.trainer
    is_training = within in _TRAINING
    is_split = split is not None and split.most is not None
    what = f"Training step {trainer.global_step} of epoch {trainer.current_epoch}"
    where = f" in its {within}" if is_training else ""
    if is_split and within == "forward pass":
        where = " in one of its parts"
    why = why or (_OF_OTHERS if trainer.world_size > 1 else "it could not be taken back and run again")
    if within == OPTIMIZER:
        why = "some of the gradients may have been applied"
        asked = f"  {', '.join(type(one).__name__ for one in trainer.optimizers)}\n{asked}"
    elif not is_training:
        what, why = f"A {within.replace('_', ' ')}", "it keeps nothing for a backward pass that it could do without"
    text = page(
        cause,
        f"{what} ran out of memory{where}: {why}.",
        asked,
        inventory,
        [*(_outcome(engine, one) for one in put_on), *([f"memory.on_oom='split': {split}"] if is_split else [])],
        _remedies(left) if is_training and within != OPTIMIZER else [],
        next((len(tensor) for tensor in tensors_in(batch) if tensor.dim()), None),
        trainer.accumulate_grad_batches if is_training else None,
        may_split=may_split,
    )
    return error_with(text, cause)


def _outcome(engine: RunEngine, named: NamedFallback) -> str:
    record = engine.report.of(named.name)
    left_alone = [f"; {len(record.refusals)} left alone: {why}" for why in record.refusals.values()][:1]
    return f"{named}: {record.outcome()} ({len(record.changes)} sites{''.join(left_alone)})"


def _remedies(left: Sequence[NamedFallback]) -> list[Remedy]:
    found = [Remedy(str(one), _in_yaml(one), one.fallback.keeps, one.fallback.only_anew) for one in left]
    if any(one.name == "gradient_checkpointing" for one in left):  # the planner finds its best mix
        mix = "plans the fastest mix that fits, block by block"
        found.insert(0, Remedy("memory='90%'", "memory: 90%", None, mix))
    return found


def _in_yaml(named: NamedFallback) -> str:
    return yaml.safe_dump(named.plan.to_dict(whole=False), default_flow_style=True).strip()[1:-1]
