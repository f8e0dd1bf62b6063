"""SLURM's signals, on which Lightning saves and requeues a job, handled by all ranks together between two steps."""

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
    """Defers the signal handlers that Lightning has registered for SLURM to the end of a training step.

    A collective call, to be made after Lightning has registered the handlers and before the first step. At the end of a
    step, a rank waits for the others for at most ``timeout``, or torch's default if None.

    Returns:
        An object whose ``undo`` must be called when the run ends; None if SLURM does not requeue the job.
    """
    environment = cluster_environment(trainer)
    if not (isinstance(environment, SLURMEnvironment) and environment.auto_requeue):
        return None
    # A group on the hosts: the ranks agree at every step, and must not wait for their devices.
    group = dist.new_group(backend="gloo", timeout=timeout) if trainer.world_size > 1 else None
    return DeferredSignals(trainer, [int(environment.requeue_signal or signal.SIGUSR1), int(signal.SIGTERM)], group)


class DeferredSignals(Callback):
    """Calls signal handlers on all ranks at the end of the step in which the first rank received the signal.

    Lightning's own handler would save a checkpoint at any line of code: perhaps within an optimizer's step, and at
    different lines on different ranks, so that their collective calls do not match. This callback runs after all
    others, so that their changes in the step are saved, at a point where Lightning can resume.

    A signal during validation waits for the end of the next step. Let SLURM send it early enough: ``#SBATCH
    --signal=SIGUSR1@600`` for ten minutes before the end.

    Handlers that are not Lightning's stay. ``group`` contains all ranks, on their hosts; None for a single process.
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
        """Ends the deferring. Lightning's handlers are not restored, since Lightning removes them right afterwards.

        Otherwise, a second signal soon after the first would make one rank call the others, which are leaving.
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
        # A checkpoint does not contain the gradients of an incomplete accumulation.
        if not is_accumulating(trainer):
            for number in self._due():
                self._handlers[number](number, None)

    def _due(self) -> list[int]:
        """Returns new signals that any rank has received, once each: ranks may receive one in different steps."""
        flags = torch.tensor([number in self._received for number in self._handlers], dtype=torch.int32)
        if self._group is not None:
            dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._group)
        due = [n for n, flag in zip(self._handlers, flags.tolist(), strict=True) if flag and n not in self._handled]
        self._handled.update(due)
        return due


def is_accumulating(trainer: Trainer) -> bool:
    """Returns whether no optimizer steps after the current training batch, so that its gradients are accumulated."""
    progress = trainer.fit_loop.epoch_loop.batch_progress
    if progress.current.ready % trainer.accumulate_grad_batches == 0:
        return False
    is_last = progress.is_last_batch or progress.current.ready == trainer.num_training_batches
    return trainer.strategy.handles_gradient_accumulation or not is_last
