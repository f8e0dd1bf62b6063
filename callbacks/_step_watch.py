"""Steps that are watched operation by operation: their FLOPs are counted, and for the record they are taken apart."""

from __future__ import annotations

from typing import Any

from lightning_accel.callbacks._allowance import Allowance
from lightning_accel.callbacks._announcements import tuning_of
from lightning_accel.callbacks._epoch_ends import is_last_of_epoch, reaches_max_steps
from lightning_accel.callbacks._flops import FlopMeter, has_room_for_eager_step
from lightning_accel.callbacks._phase_sampler import PhaseSampler
from lightning_accel.callbacks._record import FitRecord
from lightning_accel.core.clocks import clock_for
from lightning_accel.evidence.flops import FlopMode
from lightning_accel.evidence.op_profiler import AnatomyMode
from lightning_accel.lightning.packages import Trainer

_FIRST_COUNTED_STEP = 3
_TAKEN_APART_AGAIN = 100  # steps, if live trials have settled by then, else so many later
_OPERATION_S = 2e-4  # of those that a parameter has in a step, each watched
_TAKING_APART_S = 0.03


def has_settled(trainer: Trainer) -> bool:
    """Whether live trials are over, or there are none."""
    tuning = tuning_of(trainer)
    return tuning is None or tuning.is_settled


class StepWatch:
    """Decides which steps of a fit are watched.

    Attributes:
        phases: Knows which phase a step is in; None if steps are not taken apart.
        next_at: The number of steps after which one is to be watched; None if none is.
    """

    def __init__(self, trainer: Trainer, flops: FlopMeter, allowance: Allowance) -> None:
        self._trainer, self._flops, self._allowance = trainer, flops, allowance
        self.phases: PhaseSampler | None = None
        self.next_at: int | None = None
        self._was_taken_apart = False
        self._parameters = 0  # counted once

    def look(self, steps: int) -> bool:
        """Has the next step watched if the run can pay for that. Returns whether there is a step to be watched."""
        is_to_come = self._flops.is_due or (self.phases is not None and not self._was_taken_apart)
        if is_to_come and self._allowance.can_pay(self._costs_s()):
            self.next_at = steps
        return is_to_come

    def begin_if_time(self, steps: int, batch: Any, batch_idx: int) -> None:
        """Watches the step that begins after ``steps`` others, if it is one to watch."""
        is_time = steps + 1 >= _FIRST_COUNTED_STEP or self._is_last_chance(batch_idx)
        if not self._flops.is_due and not has_settled(self._trainer):
            self.next_at = steps + _TAKEN_APART_AGAIN
            return
        trainer, phases = self._trainer, self.phases
        module, device = trainer.lightning_module, trainer.strategy.root_device
        if not (is_time and has_room_for_eager_step(module, device)):
            return
        if phases is None:
            self._flops.open(FlopMode())
            return
        phases.watch()
        # Not among the first steps, in which memory budgets are planned by the same meter.
        meters = steps >= _TAKEN_APART_AGAIN
        mode = AnatomyMode(module, clock_for(device), lambda: phases.is_at_optimizer, meters=meters)
        mode.begin(batch, trainer.optimizers)
        self._flops.open(mode)

    def ended(self, steps: int, record: FitRecord | None) -> None:
        """Takes up what a watched step has shown, when it has ended as the step with this number."""
        self._was_taken_apart |= self.phases is not None
        mode = self._flops.close(keep=True)
        if not self._flops.is_due:  # else it is tried again at the next one
            is_to_come = self.phases is not None and steps < _TAKEN_APART_AGAIN
            is_payable = is_to_come and self._allowance.can_pay(self._costs_s())
            self.next_at = _TAKEN_APART_AGAIN if is_payable else None
        if isinstance(mode, AnatomyMode) and record is not None:
            with self._allowance.paying():
                record.took_apart(lambda: mode.taken(self._trainer.optimizers))

    def _costs_s(self) -> float:
        """What it takes to watch a step, about: it runs uncompiled, and is told of every operation."""
        self._parameters = self._parameters or sum(1 for _ in self._trainer.lightning_module.parameters())
        told_s = 0.0 if self.phases is None else _TAKING_APART_S
        return 2 * self._allowance.step_s + _OPERATION_S * self._parameters + told_s

    def _is_last_chance(self, batch_idx: int) -> bool:
        """Whether no step is to follow, and this one is the user's own: AccelPlugin's early steps hold its trials."""
        trainer = self._trainer
        if any(kind.__module__.startswith("lightning_accel.") for kind in type(trainer.precision_plugin).__mro__):
            return False
        is_last_epoch = trainer.max_epochs not in (None, -1) and trainer.current_epoch + 1 >= trainer.max_epochs
        return (is_last_epoch and is_last_of_epoch(trainer, batch_idx)) or reaches_max_steps(trainer)
