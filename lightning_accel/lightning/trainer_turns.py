"""Turns of live trials in a Trainer's fit: who tells of its fetches, steps and checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from lightning_accel.core.clocks import clock_for
from lightning_accel.core.patch import MethodPatch, Patch
from lightning_accel.core.tree import tensors_in
from lightning_accel.experiment.turns import Turns
from lightning_accel.lightning.packages import Trainer
from lightning_accel.lightning.private import ActionPatch, FetchPatch, hook_action
from lightning_accel.tuning.trials import LiveTrials

_REPEATS = 3  # of a turn that does not count


class TrainerTurns(Turns[LiveTrials]):
    """Tells itself of what a Trainer does.

    A turn begins where the next batch is asked for, once an optimizer has stepped: arms are switched there, and the
    batch comes to the device in the layout that its step wants. What comes after a turn's last step, an epoch's end or
    a validation, belongs to no turn.

    Args:
        trainer: In its fit.
        make_trials: Makes the trials for a batch to train on; returns None if it is not time yet.

    Attributes:
        expects_batch: Whether the next batch is one to train on; a fit validates, too.
    """

    def __init__(self, trainer: Trainer, make_trials: Callable[[Any], LiveTrials | None]) -> None:
        super().__init__()
        self.expects_batch = False
        self._trainer, self._make_trials = trainer, make_trials
        self._steps = 0  # of the optimizer, when the turn under way began

    def patches(self) -> Iterator[Patch]:
        """The edits that tell of each fetch, of the end of each step, and of checkpoints within a step."""
        trainer = self._trainer
        progress = trainer.fit_loop.epoch_loop.batch_progress

        def completed(original: Callable[..., Any]) -> Callable[..., Any]:
            def increment_completed(caller: Any) -> None:
                if caller is progress:  # and no copy of it
                    self.step_ends()
                original(caller)

            return increment_completed

        yield FetchPatch(trainer, self._fetch_begins, self._fetch_ends)
        yield MethodPatch("batch_progress", "tells of a step's end", progress, "increment_completed", completed)
        if checkpoints := [hook_action(one, "on_train_batch_end") for one in trainer.checkpoint_callbacks]:
            yield ActionPatch(trainer, checkpoints, self.pause, self.go_on)

    def batch(self, batch: Any) -> None:
        """Tells which batch the turn under way is about to train on."""
        self.expects_batch = False
        trainer = self._trainer
        if self.are_taken:
            elements = sum(tensor.numel() for tensor in tensors_in(batch))
            self.step_begins(elements, ends_epoch=trainer.fit_loop.epoch_loop.batch_progress.is_last_batch)
        elif self.trials is None and (trials := self._make_trials(batch)) is not None:
            # They begin once the optimizer has stepped next. Ranks may not agree on what counts.
            self.start(trials, clock_for(trainer.strategy.root_device), repeats=_REPEATS * (trainer.world_size == 1))
            self._steps = trainer.global_step

    def _fetch_begins(self) -> None:
        if not self.are_taken:
            return
        if self._timeline.is_open:  # `on_train_batch_start` has skipped the step, and the rest of the epoch
            self.interrupt()
            self.step_ends()
        if self._trainer.global_step != self._steps:
            self._steps = self._trainer.global_step
            self.next_turn()

    def _fetch_ends(self) -> None:
        self.expects_batch = self.trials is None or self.are_taken
