"""The engine of one run, with the results of earlier runs and the agreement between ranks."""

from __future__ import annotations

from lightning_accel.core.host import Host
from lightning_accel.core.purse import Purse
from lightning_accel.core.ranks import gather
from lightning_accel.engine import Engine
from lightning_accel.lightning.packages import LightningModule, ModelParallelStrategy, TrainerFn
from lightning_accel.lightning.run_state import RunState
from lightning_accel.settings import Plan
from lightning_accel.techniques.base import BuildContext
from lightning_accel.techniques.registry import declarations


def engine_of(
    module: LightningModule, host: Host, plan: Plan, context: BuildContext, kept: RunState, purse: Purse | None
) -> Engine:
    """Makes the engine for a run that has not begun."""
    trainer = module.trainer
    is_fitting = trainer.state.fn == TrainerFn.FITTING
    is_sharded = isinstance(trainer.strategy, ModelParallelStrategy)
    # Training keeps the ranks in step. In evaluation, each rank has its own number of batches, perhaps none. Ranks
    # then depend on each other, and may wait for a decision of rank 0, only if shards are gathered.
    steps_with_others = trainer.world_size > 1 and (is_fitting or is_sharded)
    engine = Engine(
        module,
        host,
        context.techniques,
        names=list(declarations()),
        strict=plan.strict,
        agree=trainer.strategy.broadcast if steps_with_others else None,
        gather=gather if steps_with_others else None,
        is_sharded=is_sharded,
        # A trial without gradients proves nothing for a fit. A trial in a fit holds for evaluation, too.
        decisions=kept.decisions if is_fitting else kept.decisions_without_gradients | kept.decisions,
        purse=purse,
        begins=False,
    )
    if is_fitting:
        kept.decisions = engine.decisions
    else:
        kept.decisions_without_gradients = engine.decisions
    return engine
