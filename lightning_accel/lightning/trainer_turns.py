"""Turns of live trials in a Trainer's fit, with the layers that observe fetches, steps and checkpoints."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

from typing_extensions import override

from lightning_accel.callbacks._fit_timeline import timeline_of
from lightning_accel.core.oom_errors import is_out_of_memory
from lightning_accel.core.patch import Patch
from lightning_accel.core.tree import tensors_in
from lightning_accel.lightning.packages import Trainer
from lightning_accel.lightning.private import FetchPatch
from lightning_accel.step.layers import Call, Layer
from lightning_accel.tuning.trials import LiveTrials
from lightning_accel.tuning.turns import Turns

_REPEATS = 3  # repetitions of a turn that does not count


class TrainerTurns(Turns, ABC):
    """Turns that follow the events of a Trainer.

    A turn begins with the request for the next batch after an optimizer step, with several ranks at the end of that
    step. Arms are switched there, so that the batch comes to the device in the layout that its step needs. What follows
    a turn's last step, an epoch's end or a validation, belongs to no turn.

    Attributes:
        expects_batch: Whether the next batch is a training batch; a fit validates, too.
    """

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(timeline_of(trainer))
        self.expects_batch = self._was_skipped = False
        self._trainer = trainer
        self._steps = 0  # optimizer steps when the current turn began

    @abstractmethod
    def _make_trials(self, batch: Any) -> LiveTrials | None:
        """Returns the trials once they can begin; None before."""

    def patches(self) -> Iterator[Patch]:
        """Yields the layers that report each fetch, the end of each step, and checkpoints within a step."""
        yield FetchPatch(self._trainer, self._fetch_begins, self._fetch_ends)
        yield _StepEnds(self._trainer, self)

    def batch(self, batch: Any) -> None:
        """Handles a batch before the step that trains on it."""
        self.expects_batch = False
        trainer = self._trainer
        if self.are_taken:
            elements = sum(tensor.numel() for tensor in tensors_in(batch))
            self.step_begins(elements, ends_epoch=trainer.fit_loop.epoch_loop.batch_progress.is_last_batch)
            self._turn.is_interrupted |= self._was_skipped
            self._was_skipped = False
        elif self.trials is None and (trials := self._make_trials(batch)) is not None:
            # Trials begin after the next optimizer step. Ranks may disagree on which turns count.
            self.start(trials, repeats=_REPEATS * (trainer.world_size == 1))
            self._steps = trainer.global_step

    def yields(self, error: Exception) -> bool:
        """Reverts the arm that was on trial in a step that raised. Returns whether there was one.

        If the run without the arms on trial has no memory, the arms stay and the trials end.
        """
        if self.trials is None:
            return False
        if is_out_of_memory(error):
            return self.trials.failed("out of memory") or self.trials.original_failed()
        return self.trials.failed("raised an error")

    def lose(self, name: str) -> None:
        """Removes an arm whose technique was taken back."""
        if self.trials is not None:
            self.trials.lose(name)

    def give_up(self) -> None:
        """Ends all trials, since nothing is left to switch."""
        if self.trials is not None:
            self.trials.give_up()

    def _fetch_begins(self) -> None:
        if not self.are_taken:
            return
        if self._timeline.labels.pop(self, None) is not None:
            # The label is still here, so no step has run: `on_train_batch_start` returned -1. Neither this turn nor the
            # next, which may span two epochs, counts.
            self._turn.is_interrupted = self._was_skipped = True
            self._turn.untimed -= 1
        self._next_turn_after_step()

    def step_completed(self) -> None:
        """On several ranks, begins the next turn before the loop goes on.

        They meet there in an exchange. A fetch would be too late: one rank may begin an epoch with it, while another
        waits within Lightning's broadcast that precedes every other fetch.
        """
        if self.are_taken and self._trainer.world_size > 1:
            self._next_turn_after_step()

    def _next_turn_after_step(self) -> None:
        if self._trainer.global_step != self._steps:
            self._steps = self._trainer.global_step
            self.next_turn()

    def _fetch_ends(self) -> None:
        self.expects_batch = self.trials is None or self.are_taken


class _StepEnds(Layer):
    """Ends the steps of turns with ``on_train_batch_end``, and excludes the time of checkpoints."""

    name = "timeline"

    def __init__(self, trainer: Trainer, turns: TrainerTurns) -> None:
        checkpoints = [(one, ("on_train_batch_end",)) for one in trainer.checkpoint_callbacks]
        super().__init__([(trainer.fit_loop.epoch_loop.batch_progress, ("increment_completed",)), *checkpoints])
        self._turns, self._timeline = turns, timeline_of(trainer)

    def around_increment_completed(self, call: Call) -> None:
        if self._turns.trials is not None:
            self._turns.step_ends()
        call()
        self._turns.step_completed()

    def around_on_train_batch_end(self, call: Call, *args: Any) -> None:
        self._timeline.mark_aside()
        call(*args)
        self._timeline.mark_aside()

    @override
    def _undo(self) -> None:
        super()._undo()
        self._turns.stop()
