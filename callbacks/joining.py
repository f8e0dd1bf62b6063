"""How a `SpeedMemoryLogger` joins a run that is about to start."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.trainer.states import TrainerFn

from lightning_accel.callbacks.speed_memory import SpeedMemoryLogger


def add_speed_memory_logger(trainer: Trainer, module: LightningModule) -> None:
    """Adds one to the callbacks of ``trainer``, unless it has one or is to be bare."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    if trainer.barebones or any(isinstance(callback, SpeedMemoryLogger) for callback in callbacks):
        return
    logger = SpeedMemoryLogger()
    # Before the checkpoint callbacks, which may monitor what it logs.
    place = next((i for i, callback in enumerate(callbacks) if isinstance(callback, Checkpoint)), len(callbacks))
    callbacks.insert(place, logger)
    logger.setup(trainer, module, stage=TrainerFn.FITTING)  # the setup hooks have run already
