"""How the trainings of :mod:`_faults` are run: in turns with others, or alone.

    python benchmarks/_fault_runs.py NAME FOLDER STEPS

trains one with its fault, as ``traceml run`` wants it: a script.
"""

from __future__ import annotations

import logging
import sys
import warnings
from multiprocessing.connection import Connection
from pathlib import Path

from _faults import TRAININGS
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from typing_extensions import override

from lightning_accel.callbacks import SpeedMemoryLogger

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from _turns import Job


class TakesTurns(Callback):
    """Waits before every epoch until it is told to train it.

    Args:
        pipe: To the parent, which is told when the turn before has ended.
    """

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._pipe.send(None)
        self._pipe.recv()


def train(job: Job, pipe: Connection) -> None:
    """A training with its fault or mended, an epoch a turn; its record is in the job's folder."""
    steps = max(2, round(job.options["scale"] * TRAININGS[job.name].steps))
    callbacks = [SpeedMemoryLogger(every_s=0.0), TakesTurns(pipe)]  # each turn is measured, also one below a second
    fit(job.name, job.folder, steps, is_mended=job.mode == "mended", epochs=job.options["rounds"], callbacks=callbacks)
    pipe.send(None)  # not before the run has left its record and its report: its neighbour's last turn would be slowed
    pipe.recv()
    pipe.send(None)  # the outcome, of which the record holds all


def fit(name: str, folder: Path, steps: int, *, is_mended: bool, epochs: int, callbacks: list[Callback]) -> None:
    """Trains one of them on a CPU, with its record in ``folder``."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    seed_everything(0, verbose=False)
    made = TRAININGS[name].build(steps, is_mended)
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        logger=made.logger(folder),
        callbacks=callbacks,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **made.options,
    )
    trainer.fit(made.module, made.data)


if __name__ == "__main__":
    fit(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), is_mended=False, epochs=1, callbacks=[])
