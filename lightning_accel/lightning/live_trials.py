"""Live trials under a Trainer: what a turn is, how long it took, and which of them count."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import Trainer

from lightning_accel.core.clocks import StepClock
from lightning_accel.core.patch import Patch
from lightning_accel.core.tree import tensors_in
from lightning_accel.lightning.private import fetch_patches
from lightning_accel.tuning.trials import LiveTrials


@dataclass
class _Turn:
    """From one optimizer step to the next; a batch of it is a cycle of the clock."""

    batches: int = 0
    timed: int = 0  # of those
    seconds: float = 0.0
    elements: int = 0  # of the tensors in its batches
    is_interrupted: bool = False
    is_over: bool = False


class Turns:
    """Has live trials take their turns on the training steps of a fit.

    A turn begins where the next batch is asked for, once an optimizer has stepped. So a switch is over before the
    clock goes on, and the batch comes to the device in the layout that its step wants.

    Args:
        trainer: In its fit.
        clock: Of its device.
        make_trials: Makes the trials, once the run is ready for them; None: not yet.
    """

    def __init__(self, trainer: Trainer, clock: StepClock, make_trials: Callable[[Any], LiveTrials | None]) -> None:
        self.trials: LiveTrials | None = None
        self._trainer = trainer
        self._clock = clock
        self._make_trials = make_trials
        self._read = 0  # of the clock's cycles
        self._turn = _Turn()
        self._cycles: deque[_Turn] = deque()  # whose time is not known yet
        self._unheard: deque[_Turn] = deque()  # turns of the trials, in their order
        self._steps = trainer.global_step
        self._has_batch = False
        self._typical_elements = 0

    def patches(self) -> Iterator[Patch]:
        """The edits to the Trainer's profiler, which is told of every fetch."""
        return fetch_patches(self._trainer, self._fetch_begins, self._clock.fetch_ended)

    def batch(self, batch: Any) -> None:
        """Tells which batch the turn under way is about to train on."""
        self._has_batch = True
        self._turn.batches += 1
        self._turn.elements += sum(tensor.numel() for tensor in tensors_in(batch))
        self._turn.is_interrupted |= self._trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        if self.trials is None:
            self.trials = self._make_trials(batch)
            self._turn.is_interrupted = True  # the trials begin with the next one

    def interrupt(self) -> None:
        """Tells that something else than training goes on: the turn does not count."""
        self._turn.is_interrupted = True

    def _fetch_begins(self) -> None:
        if self._has_batch:  # not where a fetcher looks ahead, or an epoch begins
            self._has_batch = False
            self._clock.step_ended(0)
            self._cycles.append(self._turn)
            if self._trainer.global_step != self._steps:
                self._steps = self._trainer.global_step
                self._begin()
        self._clock.fetch_began()

    def _begin(self) -> None:
        self._turn.is_over = True
        self._hear()
        self._turn = _Turn()
        if self.trials is not None:
            self.trials.begin()
            self._unheard.append(self._turn)

    def _hear(self) -> None:
        """Reads the clock, and gives the trials the times of those of their turns that are known whole."""
        known = self._clock.timed.step_ms
        while self._read < len(known):
            turn = self._cycles.popleft()
            turn.seconds += known[self._read] / 1e3
            turn.timed += 1
            self._read += 1
        while self._unheard and self._unheard[0].is_over and self._unheard[0].timed == self._unheard[0].batches:
            turn = self._unheard.popleft()
            assert self.trials is not None
            self._typical_elements = self._typical_elements or turn.elements
            # By element, as if every batch were as large as the first.
            scale = self._typical_elements / turn.elements if turn.elements else 1.0
            self.trials.took(None if turn.is_interrupted else turn.seconds * scale)
