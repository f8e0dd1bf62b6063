"""Common base of the plugins for a Trainer: the current run, the contexts of its steps, and its end."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from typing_extensions import override

from lightning_accel.callbacks.speed_memory import SpeedMemoryLogger, speed_memory_loggers
from lightning_accel.lightning.added_logger import AddedLogger
from lightning_accel.lightning.autocast_precision import nested
from lightning_accel.lightning.packages import Precision, Trainer
from lightning_accel.lightning.plugin_base import PluginBase
from lightning_accel.lightning.run import Run
from lightning_accel.techniques.mixed_precision import Autocast


class TrainerPlugin(PluginBase, Autocast, Precision):
    """A plugin that runs steps through a run's techniques, within its own autocast. Goes before that base class."""

    _run: Run | None = None
    _added_logger: AddedLogger | None = None

    @override
    def train_step_context(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return self._step("train")

    @override
    def val_step_context(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return self._step("validate")

    @override
    def test_step_context(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return self._step("test")

    @override
    def predict_step_context(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return self._step("predict")

    def _step(self, stage: str) -> AbstractContextManager[None]:
        forward = self.step_context()
        if self._run is None:
            return forward
        # The sanity check before a fit must not decide for training.
        step = self._run.engine.step(stage, may_try=stage == "train" or not self._run.is_fitting)
        return step if isinstance(forward, nullcontext) else nested(forward, step)

    def _interrupt(self) -> None:
        """Tells all timers of steps that the next work is not training."""
        if self._run is not None:
            self._run.engine.interrupt()
        if self._added_logger is not None:
            self._added_logger.logger.interrupt()

    def _loggers(self, trainer: Trainer) -> list[SpeedMemoryLogger]:
        added = [] if self._added_logger is None else [self._added_logger.logger]
        return speed_memory_loggers(trainer) + added

    def _end_run(self) -> None:
        if self._added_logger is not None:
            self._added_logger.close()
        if self._run is not None:
            self._run.close()
        self._run = self._added_logger = None
