"""The error page of a run that ends without memory, made from the run's state and its attempts."""

from __future__ import annotations

from collections.abc import Sequence

import yaml

from lightning_accel.assembly import NamedFallback
from lightning_accel.lightning.packages import Trainer
from lightning_accel.lightning.run_engine import RunEngine
from lightning_accel.memory.oom_report import Remedy

OPTIMIZER = "optimizer's step"
TRAINING = ("forward pass", "backward pass", OPTIMIZER)
_OF_OTHERS = (
    "several processes train together, and one of them cannot run a step again alone. Restart all of them with other"
    " settings"
)


def headline(trainer: Trainer, within: str, why: str, *, is_split: bool) -> str:
    """Says which step ran out of memory, and why it could not run again.

    Args:
        trainer: The Trainer.
        within: The part of the step that raised the error.
        why: Why the step could not run again; empty if it was not tried.
        is_split: Whether the batch went through the step in parts.
    """
    if within == OPTIMIZER:
        why = "some of the gradients may have been applied"
    elif within not in TRAINING:
        what = within.replace("_", " ")
        return f"A {what} ran out of memory: it keeps nothing for a backward pass that it could do without."
    where = "one of its parts" if is_split and within == "forward pass" else f"its {within}"
    why = why or (_OF_OTHERS if trainer.world_size > 1 else "it could not be taken back and run again")
    return f"Training step {trainer.global_step} of epoch {trainer.current_epoch} ran out of memory in {where}: {why}."


def outcome(engine: RunEngine, named: NamedFallback) -> str:
    """Says what became of a fallback that was put on."""
    record = engine.report.of(named.name)
    left_alone = [f"; {len(record.refusals)} left alone: {why}" for why in record.refusals.values()][:1]
    return f"{named}: {record.outcome()} ({len(record.changes)} sites{''.join(left_alone)})"


def remedies(left: Sequence[NamedFallback]) -> list[Remedy]:
    """Returns what the user could set for another run, by the fallbacks that remain."""
    found = [Remedy(str(one), _in_yaml(one), one.fallback.keeps, one.fallback.only_anew) for one in left]
    if any(one.name == "gradient_checkpointing" for one in left):  # the planner finds its best mix
        mix = "plans the fastest mix that fits, block by block"
        found.insert(0, Remedy("memory='90%'", "memory: 90%", None, mix))
    return found


def _in_yaml(named: NamedFallback) -> str:
    return yaml.safe_dump(named.plan.to_dict(whole=False), default_flow_style=True).strip()[1:-1]
