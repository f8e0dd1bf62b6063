"""Signals of SLURM, on which Lightning saves and requeues a job: all ranks act on them together, between two steps."""

from __future__ import annotations

import signal
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import override

from lightning_accel.lightning.packages import Callback, LightningModule, SLURMEnvironment, Trainer, is_lightnings
from lightning_accel.lightning.private import cluster_environment


def defer_signals(trainer: Trainer, timeout: timedelta | None = None) -> DeferredSignals | None:
    """Makes the handlers that Lightning has registered for SLURM wait for the end of a training step.

    A collective call, to be made once Lightning has registered them and before the first step. A rank waits for the
    others at the end of a step for so long as ``timeout`` says; None: torch's default.

    Returns:
        What to call ``undo`` on when the run ends; None where the job is not one that SLURM requeues.
    """
    environment = cluster_environment(trainer)
    if not (isinstance(environment, SLURMEnvironment) and environment.auto_requeue):
        return None
    # Over the hosts: the ranks agree at every step, and no device has to catch up with its host for that.
    group = dist.new_group(backend="gloo", timeout=timeout) if trainer.world_size > 1 else None
    return DeferredSignals(trainer, [int(environment.requeue_signal or signal.SIGUSR1), int(signal.SIGTERM)], group)


class DeferredSignals(Callback):
    """Calls handlers on all ranks at the end of the step in which the first of them got the signal.

    Lightning's own would save a checkpoint at whatever line a signal interrupts. That may be in the middle of an
    optimizer's step, and on each rank another, where their collective calls do not meet. A callback that comes after
    all others saves what they have done in the step, at a place where Lightning knows to resume.

    A signal that comes while the run validates waits for the step after: let SLURM send it that much before the end,
    ``#SBATCH --signal=SIGUSR1@600`` for ten minutes.

    Where others than Lightning's handlers are registered, they stay. ``group`` is of all ranks, on their hosts; None
    for a single process.
    """

    def __init__(self, trainer: Trainer, numbers: list[int], group: dist.ProcessGroup | None) -> None:
        handlers: dict[int, Any] = {number: signal.getsignal(number) for number in numbers}
        self._handlers = {n: h for n, h in handlers.items() if is_lightnings(type(h))}
        self._group = group
        self._received: set[int] = set()
        self._handled: set[int] = set()
        for number in self._handlers:
            signal.signal(number, self._receive)
        self._callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        self._callbacks.append(self)

    def undo(self) -> None:
        """Ends the deferring. Lightning's handlers are not put back: it does away with them itself, right after this.

        A second signal on the heels of the first would otherwise have one of the ranks call the others, which are
        leaving.
        """
        if self in self._callbacks:
            self._callbacks.remove(self)
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    def _receive(self, number: int, frame: Any) -> None:
        self._received.add(number)

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        # The gradients of half a step are in no checkpoint.
        if not is_accumulating(trainer):
            for number in self._due():
                self._handlers[number](number, None)

    def _due(self) -> list[int]:
        """The signals that any rank has got; each once, as they reach a rank before and another after the same step."""
        flags = torch.tensor([number in self._received for number in self._handlers], dtype=torch.int32)
        if self._group is not None:
            dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._group)
        due = [n for n, flag in zip(self._handlers, flags.tolist(), strict=True) if flag and n not in self._handled]
        self._handled.update(due)
        return due


def is_accumulating(trainer: Trainer) -> bool:
    """Whether no optimizer steps after the training batch under way: its gradients are added to the next one's."""
    progress = trainer.fit_loop.epoch_loop.batch_progress
    if progress.current.ready % trainer.accumulate_grad_batches == 0:
        return False
    is_last = progress.is_last_batch or progress.current.ready == trainer.num_training_batches
    return trainer.strategy.handles_gradient_accumulation or not is_last
