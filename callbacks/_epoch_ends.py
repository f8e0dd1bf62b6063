"""Whether all ranks end an epoch after the same step, found out without waiting for one that does not.

Ranks step together, and each has batches of its own. Where one has fewer, as with an ``IterableDataset`` that is not
split evenly, it ends its epoch while the others wait for it in a backward pass: a collective call at the epoch's end
would wait for them in turn, until the process group's timeout.
"""

from __future__ import annotations

import contextlib
import itertools
import time
import warnings
from typing import Any, TypeVar

import torch.distributed as dist

from lightning_accel.callbacks._announcements import report_of
from lightning_accel.core.ranks import gather
from lightning_accel.lightning.packages import Trainer
from lightning_accel.resilience.requeue import is_accumulating

_PATIENCE_S = 1.0  # for a last step that did not keep the ranks together: one without a loss, say
_PATIENCE_UNFORESEEN_S = 10.0  # for ranks that stopped together and take different times over what comes after
_LOOK_S = 0.005
_fits = itertools.count()
T = TypeVar("T")


def is_last_of_epoch(trainer: Trainer, batch_idx: int) -> bool:
    """Whether the epoch ends after this batch, as far as is known before it."""
    is_last = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
    return is_last or batch_idx + 1 >= trainer.num_training_batches


def reaches_max_steps(trainer: Trainer) -> bool:
    """Whether the run ends with the optimizer's next step."""
    return trainer.max_steps != -1 and trainer.global_step + 1 >= trainer.max_steps


def turns_left(trainer: Trainer) -> float:
    """How many optimizer steps a fit still has, about; infinite where it does not end by itself."""
    batches, accumulated = trainer.num_training_batches, max(1, trainer.accumulate_grad_batches)
    epochs = float("inf") if trainer.max_epochs in (None, -1) else trainer.max_epochs - trainer.current_epoch
    an_epoch = batches if batches == float("inf") else -(-batches // accumulated)  # its last batch ends a turn, too
    turns = epochs * an_epoch - trainer.fit_loop.epoch_loop.batch_progress.current.ready / accumulated
    if trainer.max_steps == -1:
        return turns
    return min(turns, (trainer.max_steps - trainer.global_step) / _counted_a_turn(trainer))


def _counted_a_turn(trainer: Trainer) -> float:
    """How many steps Lightning counts a turn: in manual optimization, that of each optimizer."""
    if trainer.lightning_module.automatic_optimization:
        return 1.0
    batches = trainer.fit_loop.epoch_loop.batch_progress.total.completed
    return max(1.0, trainer.global_step / batches if batches else len(trainer.optimizers))


def gather_at_end(trainer: Trainer, ends: EpochEnds | None, value: T) -> list[T]:
    """Every rank's value at the end of an epoch, this one's alone where they end apart; collective where together."""
    if trainer.world_size == 1 or (ends is not None and not ends.are_together()):
        return [value]
    values = gather(value)
    if ends is not None:
        ends.forget()
    return values


class EpochEnds:
    """What the ranks tell each other of the ends of their epochs, through the store that they have met in.

    A rank announces an end before the epoch's last step, whose backward pass all ranks leave together: who is not
    announced then has more batches. The first to look decides for all, as a later look may find what it has not.

    Args:
        trainer: In its ``fit``, with several ranks.
        store: Of the default process group.
    """

    def __init__(self, trainer: Trainer, store: Any) -> None:
        self._trainer = trainer
        self._store = store
        self._rank, self._world_size = trainer.global_rank, trainer.world_size
        self._prefix = f"lightning-accel/epoch-ends/{next(_fits)}"
        self._steps = 0
        self._announced = -1  # after how many steps the latest announced end comes
        self._ended = 0  # after how many steps the epoch before did
        self._has_warned = False

    @classmethod
    def open(cls, trainer: Trainer) -> EpochEnds | None:
        """For the fit that begins; None for a single process, and where processes have met without a store."""
        if trainer.world_size == 1 or not (dist.is_available() and dist.is_initialized()):
            return None
        store = dist.group.WORLD.get_group_store()  # type: ignore[union-attr]  # there is one: it is initialized
        return None if store is None else cls(trainer, store)

    def step_begins(self, batch_idx: int) -> None:
        trainer = self._trainer
        is_last_step = reaches_max_steps(trainer) and not is_accumulating(trainer)
        if is_last_step or is_last_of_epoch(trainer, batch_idx):
            self._announce(self._steps + 1)

    def step_ended(self) -> None:
        self._steps += 1

    def are_together(self) -> bool:
        """Whether all ranks are at the end of an epoch; the same on each of those that are. Waits for seconds at most.

        Where they are not, that is said, once.
        """
        patience_s = _PATIENCE_S if self._announced == self._steps else _PATIENCE_UNFORESEEN_S
        self._announce(self._steps)
        is_empty, self._ended = self._steps == self._ended, self._steps
        if is_empty:  # there is nothing to put together, and others may be deep in their steps
            return False
        ranks = [self._key(rank) for rank in range(self._world_size)]
        looks = 0 if self._has_warned else patience_s / _LOOK_S  # not by a clock, which somebody may have stopped
        try:
            while not (is_complete := self._store.check(ranks)) and looks > 0:
                time.sleep(_LOOK_S)
                looks -= 1
            ours = "together" if is_complete else "apart"
            decided = self._store.compare_set(self._key("decided"), "", ours).decode()
        except dist.DistError:  # the process that held the store has left
            decided = "apart"
        if decided == "apart":
            self._warn()
        return bool(decided == "together")

    def forget(self) -> None:
        """Clears away what was said of the latest end, which all ranks have gone by."""
        with contextlib.suppress(dist.DistError):  # the process that held the store has left, after the last epoch
            self._store.delete_key(self._key(self._rank))
            if self._rank == 0:
                self._store.delete_key(self._key("decided"))

    def explain(self, exception: BaseException) -> None:
        """Adds to the error of a broken collective call which ranks had no more data for it, where some had not."""
        if self._announced == self._steps:  # this rank ended its epoch too
            return
        others = [rank for rank in range(self._world_size) if rank != self._rank]
        try:
            departed = [rank for rank in others if self._store.check([self._key(rank)])]
        except dist.DistError:
            return
        if not departed:
            return
        ranks = f"Rank {departed[0]}" if len(departed) == 1 else f"Ranks {', '.join(map(str, departed))}"
        exception.args = (
            f"{exception}\n{ranks} ended an epoch after training batch {self._steps} of this fit, and rank {self._rank}"
            f" had more. {_MEND}",
        )

    def _announce(self, steps: int) -> None:
        if self._announced == steps:
            return
        self._announced = steps
        key = f"{self._prefix}/{steps}/{self._rank}"
        with contextlib.suppress(dist.DistError):
            self._store.set(key, "ended")
            self._store.check([key])  # is answered when the store has it; the ranks meet in the step after that

    def _key(self, of: int | str) -> str:
        return f"{self._prefix}/{self._steps}/{of}"

    def _warn(self) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        message = (
            f"Rank {self._rank} ended epoch {self._trainer.current_epoch} after training batch {self._steps} of this"
            " fit, and not all ranks did: they have different numbers of batches. SpeedMemoryLogger then measures each"
            f" rank by itself. {_MEND}"
        )
        if (report := report_of(self._trainer)) is not None:
            report.note(message)
        warnings.warn(message, stacklevel=2)


_MEND = (
    "Ranks that average gradients need the same number of batches, or the rank with the most waits for the others in"
    " vain: split the data evenly, or set Trainer(limit_train_batches=...) to the smallest number of batches of a rank."
)
