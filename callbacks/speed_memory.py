"""Speed and memory of every training epoch, to whatever logger the Trainer has."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from lightning_accel.callbacks._clocks import StepClock, clock_for
from lightning_accel.callbacks._epoch import EpochSpeed, RankEpoch, put_together
from lightning_accel.callbacks._flops import FlopMeter, has_room_for_eager_step, peak_flops_per_sec
from lightning_accel.callbacks._meters import EnergyMeter, host_rss_mib, memory_meter_for
from lightning_accel.callbacks._samples import SampleCounter
from lightning_accel.patch import MethodPatch, PatchSet


class SpeedMemoryLogger(Callback):
    """Logs how fast every training epoch ran and how much memory it took, under ``accel/``.

    ``samples_per_sec``, ``steps_per_sec``, ``step_ms_p50``, ``step_ms_p95``, ``data_wait_frac``, ``peak_memory_mib``
    and ``host_rss_mib``; where they exist ``tflops``, ``mfu``, ``loss_scale``, ``skipped_steps`` and
    ``energy_j_per_sample``. They go to every logger of the Trainer and can be monitored; a Trainer without a logger
    prints one line an epoch. :attr:`history` keeps them as :class:`EpochSpeed`, which says what each one means.

    **A step** is one batch of the train dataloader: one ``training_step`` with its backward pass and, when the
    accumulation of gradients is complete, the optimizer's step.

    **Training time** runs from the epoch's first request for a batch to the end of its last step (the building of the
    loader's iterator is Lightning's, before that). Left out is what passes between two steps if validation ran or a
    checkpoint was saved in it. Loggers and progress bar between two steps count; so do other callbacks.
    ``data_wait_frac`` is the part of it spent inside the train dataloader's ``next``, ``step_ms`` a batch's time from
    there to the end of the step, the transfer to the device included. On CUDA all of it is measured on the device's
    own timeline by events that are read when they have passed: data that arrives while the device is still busy
    costs no wait, and nothing is synchronised before the epoch's end. Other asynchronous devices are timed from the
    host.

    **FLOPs** are counted once in a fit, in the third step (AccelPlugin tries its changes in the first two) or the last
    one of a shorter run. Being slowed by the counting, that step is left out of times and rates unless the epoch has
    no other. It runs uncompiled; a compiled model is not counted when that could exhaust the device's memory.
    Operations unknown to :mod:`torch.utils.flop_counter` (fused RNN kernels, custom kernels) count nothing.

    **Memory** is the peak of torch's device allocator, whose peak statistics are reset at each epoch's start; on other
    devices the peak of this process, and :attr:`EpochSpeed.peak_memory_source` says since when.

    Args:
        batch_size_fn: The number of samples in a batch. By default it is found in the batch: its ``batch_size``, the
            first dimension of its first tensor, the length of its first list. When that fails, the metrics of
            samples are left out.

    Attributes:
        history: One measurement for each epoch that this logger has seen, over all ranks.
    """

    def __init__(self, batch_size_fn: Callable[[Any], int] | None = None) -> None:
        super().__init__()
        self.history: list[EpochSpeed] = []
        self._batch_size_fn = batch_size_fn
        self._fit: _Fit | None = None

    @property
    def last(self) -> EpochSpeed | None:
        """The latest epoch's measurement."""
        return self.history[-1] if self.history else None

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._close()
        self._fit = _Fit(trainer, self._batch_size_fn)
        # Here too, because a run that resumes within an epoch has no on_train_epoch_start.
        self._fit.restart()

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._fit is not None:
            self._fit.restart()

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._fit is not None:
            self._fit.clock.step_began()
            if self._fit.flops.is_due:
                self._fit.count_flops_if_time(batch_idx)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._fit is not None:
            self._fit.step_ended(batch)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._fit is not None:
            self._fit.pause()

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._fit is not None:
            self._fit.resume()

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if self._fit is not None:
            self._fit.clock.pause()

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._fit is None:
            return
        speed = self._fit.measure()
        if speed is None:
            return
        self.history.append(speed)
        if trainer.barebones:
            return
        # Through the module, because a callback that joined late has no log of its own. Every rank has the same
        # values: sync_dist only keeps them on every rank, where a monitor looks for them, and Lightning content.
        pl_module.log_dict(speed.metrics(), on_step=False, on_epoch=True, sync_dist=True, batch_size=1)
        if not trainer.loggers:
            pl_module.print(speed.line())

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._close()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._close()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._close()

    def _close(self) -> None:
        fit, self._fit = self._fit, None
        if fit is not None:
            fit.close()


class _Fit:
    """The instruments of one fit."""

    _FIRST_COUNTED_STEP = 3

    def __init__(self, trainer: Trainer, batch_size_fn: Callable[[Any], int] | None) -> None:
        self._trainer = trainer
        self._device = trainer.strategy.root_device
        self._steps = 0
        self._has_unknown_samples = False
        self._skipped_before = self._skipped_steps()
        self._samples = SampleCounter(batch_size_fn, _say_samples_unknown)
        self._memory = memory_meter_for(self._device)
        self._energy = EnergyMeter.open(self._device)
        self._peak_flops = peak_flops_per_sec(self._device, str(trainer.precision))
        self.clock = clock_for(self._device)
        self.flops = FlopMeter()
        self._fetch_hooks = _time_fetches(trainer, self.clock)

    def restart(self) -> None:
        self.flops.close()
        self.clock.restart()
        self._memory.restart()
        self._has_unknown_samples = False
        if self._energy is not None:
            self._energy.restart()

    def pause(self) -> None:
        self.clock.pause()
        if self._energy is not None:
            self._energy.pause()

    def resume(self) -> None:
        if self._energy is not None:
            self._energy.resume()

    def count_flops_if_time(self, batch_idx: int) -> None:
        is_time = self._steps + 1 >= self._FIRST_COUNTED_STEP or self._is_last_chance(batch_idx)
        if is_time and has_room_for_eager_step(self._trainer.lightning_module, self._device):
            self.flops.open()

    def step_ended(self, batch: Any) -> None:
        is_counted = self.flops.is_open
        if is_counted:
            self.flops.close(keep=True)
        samples = self._samples.count(batch)
        if samples is None:
            self._has_unknown_samples = True
        self.clock.step_ended(samples or 0, is_apart=is_counted)
        self._steps += 1

    def measure(self) -> EpochSpeed | None:
        """The epoch that has ended, over all ranks. A collective call; None when there was no step."""
        self.flops.close()
        self.clock.settle()
        timed, apart = self.clock.timed, self.clock.apart
        rated = timed if timed.step_ms else apart
        steps, seconds = len(rated.step_ms), rated.train_ms / 1e3
        skipped, self._skipped_before = self._skipped_steps() - self._skipped_before, self._skipped_steps()
        rank = RankEpoch(
            steps=len(timed.step_ms) + len(apart.step_ms),
            samples=math.nan if self._has_unknown_samples else timed.samples + apart.samples,
            train_seconds=seconds,
            samples_per_sec=math.nan if self._has_unknown_samples else _per(rated.samples, seconds),
            steps_per_sec=_per(steps, seconds),
            data_wait_frac=_per(rated.wait_ms, rated.train_ms) if len(self._fetch_hooks) else math.nan,
            peak_memory_mib=self._memory.peak_mib(),
            host_rss_mib=host_rss_mib(),
            flops_per_step=math.nan if self.flops.flops is None else self.flops.flops,
            peak_flops=math.nan if self._peak_flops is None else self._peak_flops,
            loss_scale=self._loss_scale(),
            skipped_steps=skipped,
            energy_j=math.nan if self._energy is None else self._energy.joules(),
            step_ms=rated.step_ms,
        )
        return put_together(
            rank,
            self._device,
            epoch=self._trainer.current_epoch,
            world_size=self._trainer.world_size,
            peak_memory_source=self._memory.source,
        )

    def close(self) -> None:
        self.flops.close()
        self._fetch_hooks.undo()
        if self._energy is not None:
            self._energy.close()

    def _is_last_chance(self, batch_idx: int) -> bool:
        """Whether no step is to follow, and this one is the user's own: AccelPlugin's early steps hold its trials."""
        trainer = self._trainer
        if type(trainer.precision_plugin).__module__.startswith("lightning_accel."):
            return False
        ends_epoch = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch or (
            batch_idx + 1 >= trainer.num_training_batches
        )
        max_epochs = -1 if trainer.max_epochs is None else trainer.max_epochs
        is_last_epoch = max_epochs != -1 and trainer.current_epoch + 1 >= max_epochs
        is_last_step = trainer.max_steps != -1 and trainer.global_step + 1 >= trainer.max_steps
        return (ends_epoch and is_last_epoch) or is_last_step

    def _scaler(self) -> torch.amp.GradScaler | None:
        scaler = getattr(self._trainer.precision_plugin, "scaler", None)
        return scaler if isinstance(scaler, torch.amp.GradScaler) and scaler.is_enabled() else None

    def _loss_scale(self) -> float:
        scaler = self._scaler()
        return math.nan if scaler is None else float(scaler.get_scale())

    def _skipped_steps(self) -> float:
        return float(getattr(self._scaler(), "skipped_steps", math.nan))


def _time_fetches(trainer: Trainer, clock: StepClock) -> PatchSet:
    """Has ``clock`` told when the train dataloader is asked for a batch, and when it has given one.

    The training loop calls these two methods around every ``next``, for the profiler. Where they are missing nothing
    is patched: the wait is then part of the gaps between the steps, and only ``data_wait_frac`` is lost.
    """

    def began_before(original: Callable[..., Any]) -> Callable[..., Any]:
        def on_before_fetch(loop: Any) -> None:
            clock.fetch_began()
            original(loop)

        return on_before_fetch

    def ended_after(original: Callable[..., Any]) -> Callable[..., Any]:
        def on_after_fetch(loop: Any) -> None:
            original(loop)
            clock.fetch_ended()

        return on_after_fetch

    loop = trainer.fit_loop.epoch_loop
    hooks = {"_on_before_fetch": began_before, "_on_after_fetch": ended_after}
    if not all(hasattr(loop, name) for name in hooks):
        return PatchSet()
    patches = PatchSet(MethodPatch(name, "timed", loop, name, wrap) for name, wrap in hooks.items())
    patches.apply()
    return patches


def _per(amount: float, total: float) -> float:
    return amount / total if total > 0 else 0.0


def _say_samples_unknown(batch: Any) -> None:
    rank_zero_info(
        f"SpeedMemoryLogger: a batch of type {type(batch).__name__} does not tell how many samples it holds, so"
        " samples_per_sec is left out. Give SpeedMemoryLogger(batch_size_fn=...) to have it."
    )
