"""The :class:`SpeedMemoryLogger` of a fit whose Trainer has none."""

from __future__ import annotations

from lightning_accel.callbacks._detached_callback import DetachedCallback
from lightning_accel.callbacks.speed_memory import SpeedMemoryLogger, speed_memory_loggers
from lightning_accel.lightning.packages import LightningModule, Trainer
from lightning_accel.settings import Plan


class AddedLogger:
    """A :class:`SpeedMemoryLogger` that runs during a fit but is not in the Trainer's list of callbacks.

    Attributes:
        logger: The logger.
    """

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        self.logger = SpeedMemoryLogger()
        self._trainer, self._module = trainer, module
        self._layer = DetachedCallback(trainer, module, self.logger)
        self._layer.apply()

    @classmethod
    def where_wanted(cls, plan: Plan, trainer: Trainer, module: LightningModule) -> AddedLogger | None:
        """Makes one for the fit that begins. None if the plan logs nothing or the Trainer has a logger of this kind."""
        if not plan.report or trainer.barebones or speed_memory_loggers(trainer):
            return None
        return cls(trainer, module)

    def close(self) -> None:
        """Ends the record of the fit, and undoes the edits to the Trainer."""
        self.logger.on_fit_end(self._trainer, self._module)
        self.logger.teardown(self._trainer, self._module, "fit")
        self._layer.undo()
