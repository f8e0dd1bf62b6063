"""The engine of one run of a Trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from typing_extensions import override

from lightning_accel.assembly import build_context
from lightning_accel.core.layout import restore_layouts
from lightning_accel.core.purse import Purse
from lightning_accel.core.ranks import gather
from lightning_accel.core.states import VerdictKind
from lightning_accel.engine import Engine
from lightning_accel.lightning.met_programs import Program
from lightning_accel.lightning.packages import ModelParallelStrategy, TrainerFn
from lightning_accel.lightning.trainer_turns import TrainerTurns
from lightning_accel.techniques.arms import Arm
from lightning_accel.techniques.memory_format import MemoryFormat
from lightning_accel.techniques.mixed_precision import Autocast
from lightning_accel.techniques.registry import declarations


class RunEngine(Engine):
    """An engine that has not begun, with the results of earlier runs and the agreement between ranks."""

    live: TrainerTurns | None = None  # the live trials; None if there are none

    def __init__(self, program: Program, precision: Autocast, purse: Purse | None) -> None:
        self.program, self.precision, self.purse = program, precision, purse
        self.can_repeat_step: Callable[[], bool] = lambda: False  # if an edit raises an error in the current step
        self.module, self.plan, self.kept = module, plan, kept = program.module, program.plan, program.kept
        trainer, host = module.trainer, program.host
        self.context = build_context(plan, module, host, device=trainer.strategy.root_device)
        self.is_fitting = trainer.state.fn == TrainerFn.FITTING
        self.is_sharded = isinstance(trainer.strategy, ModelParallelStrategy)
        # Training keeps the ranks in step. In evaluation, each rank has its own number of batches, perhaps none. Ranks
        # then depend on each other, and may wait for a decision of rank 0, only if shards are gathered.
        steps_with_others = trainer.world_size > 1 and (self.is_fitting or self.is_sharded)
        super().__init__(
            module,
            host,
            self.context.techniques,
            names=list(declarations()),
            strict=plan.strict,
            agree=trainer.strategy.broadcast if steps_with_others else None,
            gather=gather if steps_with_others else None,
            is_sharded=self.is_sharded,
            # A trial without gradients proves nothing for a fit. A trial in a fit holds for evaluation, too.
            decisions=kept.decisions if self.is_fitting else kept.decisions_without_gradients | kept.decisions,
            purse=purse,
            begins=False,
        )
        if self.is_fitting:
            kept.decisions = self.decisions
        else:
            kept.decisions_without_gradients = self.decisions

    @override
    def arms(self) -> list[Arm]:
        return [*([] if self._has_fixed_format else self.precision.arms()), *super().arms()]

    @property
    def _has_fixed_format(self) -> bool:
        """Whether shards are gathered in the number format of the steps, which no step can then leave."""
        sharding = getattr(self.module.trainer.strategy, "sharding", None)
        return sharding is not None and sharding.dtype is not None

    @property
    def alters_steps(self) -> bool:
        """Whether a step differs from the user's own, by edits or by our choice of the precision."""
        return self.has_edits or self.precision.is_ours

    def revert(self, name: str, reason: str, kind: VerdictKind) -> None:
        """Reverts a technique, or the precision, for the rest of the run, with a verdict of this kind."""
        if self.live is not None:
            self.live.lose(name)
        if name != "precision":
            self.revert_all(reason, name, kind)
        elif not self._has_fixed_format:
            self.precision.give_up(self.report, reason)

    def end_trials(self) -> None:
        """Ends the live trials, since nothing is left to switch."""
        if self.live is not None:
            self.live.give_up()

    def restore_layouts(self, checkpoint: dict[str, Any]) -> None:
        """Gives the tensors of a checkpoint the memory layouts that the user's tensors had before the run."""
        memory_format = self.technique(MemoryFormat)
        if memory_format is not None:
            restore_layouts(checkpoint, self.module, self.module.trainer.optimizers, memory_format.strides())

    def interrupt(self) -> None:
        """Tells the live trials that no training step comes next."""
        if self.live is not None:
            self.live.interrupt()
