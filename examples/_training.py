"""Training runs that take turns: one run, in the process that it has for itself."""

from __future__ import annotations

import importlib
import logging
import warnings
from multiprocessing.connection import Connection
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.loggers import TensorBoardLogger

from _turns import Job, Outcome
from lightning_accel.callbacks import SpeedMemoryLogger


class Gate(Callback):
    """Waits for the parent's word before every epoch, and tells it what the epoch measured afterwards.

    It waits between epochs, where :class:`SpeedMemoryLogger` measures nothing: neither as step nor as wait for data.
    The process is asleep in a read meanwhile; torch's own threads go to sleep soon after their last work.

    Args:
        pipe: To the parent.
        speed: Whose measurements are told.

    Attributes:
        first_loss: The validation loss of Lightning's sanity check, which comes before any training.
    """

    def __init__(self, pipe: Connection, speed: SpeedMemoryLogger) -> None:
        self.first_loss = float("nan")
        self._pipe = pipe
        self._speed = speed

    def on_sanity_check_end(self, trainer: Any, pl_module: Any) -> None:
        self.first_loss = float(trainer.callback_metrics["val/loss"])

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.tell()
        self._pipe.recv()

    def tell(self) -> None:
        """Sends what the epoch that has ended measured; None before the first."""
        self._pipe.send(self._speed.last)


def train(job: Job, pipe: Connection) -> None:
    """``examples/<name>.py`` as it stands, an epoch a turn, with a logger and two callbacks that measure and wait."""
    # Lightning's advice on the number of workers and the like, which is the same for both sides.
    warnings.filterwarnings("ignore", module=r"lightning\.pytorch")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    speed = SpeedMemoryLogger(every_s=0.0)
    gate = Gate(pipe, speed)
    trainer = importlib.import_module(job.name).train(
        plain=job.mode == "plain",
        callbacks=[gate, speed],
        logger=TensorBoardLogger(job.log_dir, name=job.name, version=job.mode),
        accelerator=job.accelerator,
        devices=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **job.options,
    )
    gate.tell()
    pipe.recv()
    accuracy = trainer.callback_metrics.get("val/accuracy")
    report = None if job.mode == "plain" else trainer.precision_plugin.report
    pipe.send(
        Outcome(
            first_loss=gate.first_loss,
            final_loss=float(trainer.callback_metrics["val/loss"]),
            final_accuracy=None if accuracy is None else float(accuracy),
            summary="" if report is None else report.summary(),
            report=None if report is None else report.to_dict(),
        )
    )
