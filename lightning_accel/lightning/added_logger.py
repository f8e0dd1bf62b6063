"""The measure of speed and memory that a fit has where the user gave none: no callback of the Trainer."""

from __future__ import annotations

from lightning_accel.callbacks._detached_callback import DetachedCallback
from lightning_accel.callbacks.speed_memory import SpeedMemoryLogger, speed_memory_loggers
from lightning_accel.lightning.packages import LightningModule, Trainer
from lightning_accel.settings import Plan


class AddedLogger:
    """A :class:`SpeedMemoryLogger` beside the callbacks of a Trainer, from the fit's start to its end.

    Attributes:
        logger: The measure.
    """

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        self.logger = SpeedMemoryLogger()
        self._trainer, self._module = trainer, module
        self._layer = DetachedCallback(trainer, module, self.logger)
        self._layer.apply()

    @classmethod
    def where_wanted(cls, plan: Plan, trainer: Trainer, module: LightningModule) -> AddedLogger | None:
        """For the fit that begins; None where the plan logs nothing, and where the user has a logger of this kind."""
        if not plan.report or trainer.barebones or speed_memory_loggers(trainer):
            return None
        return cls(trainer, module)

    def close(self) -> None:
        """Ends the record of the fit, and takes the edits to the Trainer back."""
        self.logger.on_fit_end(self._trainer, self._module)
        self.logger.teardown(self._trainer, self._module, "fit")
        self._layer.undo()
