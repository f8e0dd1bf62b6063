"""Speed and memory of training, epoch by epoch or second by second, to whatever logger the Trainer has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_accel.callbacks._allowance import Rests
from lightning_accel.callbacks._instruments import FitInstruments
from lightning_accel.callbacks._record import FitRecord
from lightning_accel.callbacks._reporting import record_folder
from lightning_accel.core.patch import AttributePatch, PatchSet
from lightning_accel.evidence.epoch_speed import PREFIX, EpochSpeed
from lightning_accel.evidence.record import FOLDER
from lightning_accel.lightning.packages import Callback, LightningModule, Trainer, callbacks_of, own, rank_zero_warn
from lightning_accel.memory.oom_report import StepMemoryError
from lightning_accel.resilience.lost_ranks import is_broken_collective

_HOOKS_OF_A_STEP = (
    *("on_train_batch_start", "on_train_batch_end", "on_validation_batch_start", "on_validation_batch_end"),
    *("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step"),
)


class SpeedMemoryLogger(Callback):
    """Logs how fast training epochs ran and how much memory they took, under ``accel/``.

    ``samples_per_sec``, ``steps_per_sec``, ``step_ms_p50``, ``step_ms_p95``, ``data_wait_frac``, ``peak_memory_mib``
    and ``host_rss_mib``; where they exist ``tflops``, ``mfu``, ``loss_scale``, ``skipped_steps`` and
    ``energy_j_per_sample``; with several ranks ``step_ms_p95_slowest_rank`` and
    ``before_backward_ms_p95_latest_rank``. They go to every logger of the Trainer. :attr:`history` keeps them as
    :class:`EpochSpeed`, which says what each one means.

    **By time.** Epochs that end within a second of the latest measurement are measured together with those that
    follow, as if they were one; the last one is always told. Each is measured by itself where a callback or a
    scheduler monitors one of the metrics, and with several ranks.

    **What it costs.** One in a Trainer's ``callbacks`` does all that is said here. AccelPlugin's own, of which nobody
    has asked anything, may take a fifth of a percent of what the run is expected to take: until then it keeps the time
    of steps, and nothing else. Where to time each takes too much of short ones, it times a few in a row, and then for a
    while sixteen at once. ``report=`` and ``$LIGHTNING_ACCEL_RECORD`` ask for all of it, too.

    **Where they show.** One in a Trainer's ``callbacks`` logs as the module does: ``ModelCheckpoint`` and others can
    monitor it. Where there is none, AccelPlugin has one measure that is no callback of the Trainer and tells the
    loggers alone: ``callback_metrics``, ``logged_metrics`` and the progress bar are as without it.

    **A step** is one batch of the train dataloader: one ``training_step`` with its backward pass and, when the
    accumulation of gradients is complete, the optimizer's step.

    **Training time** runs from the epoch's first request for a batch to the end of its last step. Loggers, progress
    bar and other callbacks between two steps count; a gap in which validation ran or a checkpoint was saved does not.
    ``data_wait_frac`` is the part of it spent inside the train dataloader's ``next``, ``step_ms`` a batch's time from
    there to the end of the step, the transfer to the device included. On CUDA all of it is measured on the device's
    own timeline by events that are read when they have passed: data that arrives while the device is still busy
    costs no wait, and nothing is synchronised before the epoch's end. Other asynchronous devices are timed from the
    host. Where an epoch waits for more than a tenth of its time, the logger says once what to change, and notes it in
    AccelPlugin's report.

    **FLOPs** are counted once in a fit, in the third step (AccelPlugin tries its changes in the first two) or the last
    one of a shorter run. Being slowed by the counting, that step is left out of times and rates, which are those of
    three steps at least. It runs uncompiled; a compiled model is not counted when that could exhaust the device's
    memory. Operations unknown to :mod:`torch.utils.flop_counter` (fused RNN kernels, custom kernels) count nothing.

    **Memory** is the peak of torch's device allocator, whose peak statistics are reset at each epoch's start; on other
    devices the peak of this process, and :attr:`EpochSpeed.peak_memory_source` says since when.

    **A record** of the run is kept beside its logs where the first logger has a folder (``<folder>/accel/*.jsonl``):
    times and losses of its steps, by which ``lightning-accel compare`` sets two runs beside each other. Once a minute,
    to be read, these losses are waited for.

    **At the end**, and where live trials settle, the loggers that can show more than metrics get a text; at the end
    also a figure of what a step's time goes to (with matplotlib), settings with what came of them, and an arrangement
    of these charts: TensorBoard, Weights & Biases, MLflow and CSV, each what it can show. One line says it on the
    console: the speed there is that of the whole run, as reports and ``lightning-accel compare`` have it.

    **Several ranks** log the same values on each: rates and FLOPs add up, memory is the largest rank's, ``step_ms`` is
    of the steps of all. Ranks wait for each other in the backward pass, so that a slow one makes the steps of all long;
    ``before_backward_ms`` is what a rank takes before it comes there, and the one that takes longest holds the others
    up. :attr:`EpochSpeed.stragglers` names it, and says where this cannot be told. A rank that has fewer batches than
    others, as with an ``IterableDataset`` that is split unevenly, waits for none of them at its epoch's end: it warns,
    and the numbers of that epoch are its own, with an :attr:`EpochSpeed.world_size` of 1.

    Args:
        batch_size_fn: The number of samples in a batch. By default it is found in the batch: its ``batch_size``, the
            first dimension of its first tensor, the length of its first list. When that fails, the metrics of
            samples are left out.
        every_s: Seconds from one measurement to the next, at least; 0: every epoch is measured by itself.

    Attributes:
        history: One measurement for each epoch that this logger has seen, or for several short ones, over all ranks.
        rests: Says how many steps to come this is not told of, but for the end of the last one, by :meth:`rested`.
    """

    def __init__(self, batch_size_fn: Callable[[Any], int] | None = None, every_s: float = 1.0) -> None:
        super().__init__()
        self._every_s = every_s
        self.history: list[EpochSpeed] = []
        self._batch_size_fn = batch_size_fn
        self._fit: FitInstruments | None = None
        self.rests = Rests()
        self._ending: FitRecord | None = None  # of a fit whose steps are over
        self._passed_over = PatchSet()
        self._is_callback = True  # one of the Trainer's

    @property
    def last(self) -> EpochSpeed | None:
        """The latest epoch's measurement."""
        return self.history[-1] if self.history else None

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._close()
        users = speed_memory_loggers(trainer)
        self._is_callback = self in users
        if users and self is not users[0]:
            if self._is_callback:
                rank_zero_warn("This Trainer has more than one SpeedMemoryLogger: only the first one measures.")
            return
        every_s = 0.0 if self._is_callback and _is_monitored(trainer) else self._every_s
        self.rests = Rests()
        self._fit = FitInstruments(trainer, self._batch_size_fn, every_s, self.rests, is_asked=self._is_callback)
        if self._is_callback:
            self._pass_over({name: getattr(own(trainer, Callback), name) for name in _HOOKS_OF_A_STEP})
            if trainer.world_size == 1:  # a single rank keeps nobody waiting
                self._pass_over({"on_before_backward": SpeedMemoryLogger.on_before_backward})

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._fit is not None:
            self._fit.epoch_began()

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._fit is None:
            return
        self._fit.step_began()
        if self._fit.ends is not None:
            self._fit.ends.step_begins(batch_idx)
        watch, steps = self._fit.watch, self._fit.steps
        if watch.next_at is not None and steps >= watch.next_at:
            watch.begin_if_time(steps, batch, batch_idx)

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if self._fit is not None:
            self._fit.timeline.backward_began()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._fit is not None:
            self._fit.step_ended(batch, outputs)

    def rested(self, outputs: Any) -> None:
        """Told at the end of the last step of a rest."""
        if self._fit is not None:
            self._fit.rested(outputs)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._fit is not None:
            self._fit.pause()

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._fit is not None:
            self._fit.interval.energy.resume()

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self.interrupt()

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._fit is not None and self._fit.epoch_ended():
            self._tell(self._fit, trainer)

    def _tell(self, fit: FitInstruments, trainer: Trainer) -> None:
        """Tells whoever is to hear of it what was measured since it was told last."""
        speed = fit.measure()
        if speed is None:
            return
        self.history.append(speed)
        if trainer.barebones:
            return
        metrics = speed.metrics()
        if self._is_callback:
            # Not by `log`, which takes milliseconds. As tensors of the host, which no device has to be asked for.
            for shown in (trainer.callback_metrics, trainer.logged_metrics):
                shown.update({name: torch.tensor(value) for name, value in metrics.items()})
        self.log_beside(metrics)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end_steps(trainer)
        self._close()

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end_record(trainer)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self._fit is not None and self._fit.ends is not None and is_broken_collective(exception):
            self._fit.ends.explain(exception)
        try:
            self._end_steps(trainer, exception)
            self._end_record(trainer, exception)
        finally:
            self._close()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._close()

    def interrupt(self) -> None:
        """Told that what comes next is no step of training."""
        if self._fit is not None:
            self._fit.pause_timeline()

    def log_beside(self, metrics: Mapping[str, float]) -> None:
        """Tells the loggers of metrics that are none of the user's."""
        if self._fit is not None and self._fit.teller is not None:
            self._fit.teller.log(metrics)

    def settled(self) -> None:
        """Told where live trials have settled."""
        if self._fit is not None:
            self._fit.settled()

    def _pass_over(self, idle: dict[str, Any]) -> None:
        """Has Lightning leave out those of these hooks that are not overridden: there is nothing to do in them.

        It passes over a hook that is None. To call an empty one takes longer than all that is measured here.
        """
        for name, hook in idle.items():
            if name not in vars(self) and getattr(type(self), name) is hook:
                self._passed_over.add(AttributePatch(name, "passed over", self, name, None))
        self._passed_over.apply()

    def _end_steps(self, trainer: Trainer, exception: BaseException | None = None) -> None:
        if self._fit is None:
            return
        if self._fit.epochs and (exception is None or isinstance(exception, KeyboardInterrupt)):
            self._tell(self._fit, trainer)
        self._ending = self._fit.record
        self._fit.ended(exception)

    def _end_record(self, trainer: Trainer, exception: BaseException | None = None) -> None:
        record, self._ending = self._ending, None
        if isinstance(exception, StepMemoryError):
            _leave_page(trainer, exception, record)
        elif record is not None:
            record.end(exception)

    def _close(self) -> None:
        self._passed_over.undo()
        self._passed_over = PatchSet()
        fit, self._fit = self._fit, None
        if fit is not None:
            fit.close()


def leave_page_of_evaluation(trainer: Trainer, error: StepMemoryError) -> None:
    """Leaves the page of a lack of memory in a run that only evaluates, in which no SpeedMemoryLogger measures."""
    if not trainer.barebones and not speed_memory_loggers(trainer):
        _leave_page(trainer, error)


def _leave_page(trainer: Trainer, error: StepMemoryError, record: FitRecord | None = None) -> None:
    """Ends a record of it, for the page beside it: one without steps of an evaluation, or of a rank that keeps none."""
    record = FitRecord(trainer) if record is None else record
    if record.folder is None:
        record.keep_in(record_folder(trainer) or Path(trainer.default_root_dir) / FOLDER)
    record.end(error)


def _is_monitored(trainer: Trainer) -> bool:
    """Whether one of the user's callbacks or schedulers looks at what is logged here after every epoch."""
    monitors = [getattr(one, "monitor", None) for one in (*callbacks_of(trainer), *trainer.lr_scheduler_configs)]
    return any(isinstance(monitor, str) and monitor.startswith(PREFIX) for monitor in monitors)


def speed_memory_loggers(trainer: Trainer) -> list[SpeedMemoryLogger]:
    """Those among the Trainer's callbacks."""
    return callbacks_of(trainer, SpeedMemoryLogger)
