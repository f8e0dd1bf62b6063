"""The process of a run on trial: trains a few turns at a time, and sends their measurements.

A process reads a job once. On Linux with training on the CPU, every run is then a fork of this process, which has
everything imported. Elsewhere the process itself is the only run.
"""

from __future__ import annotations

import sys
import tempfile
import traceback
import warnings
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import torch
from typing_extensions import override

from lightning_accel.core.clocks import HostClock, Stopwatch
from lightning_accel.core.device import synchronize
from lightning_accel.core.oom_errors import is_out_of_memory
from lightning_accel.core.peak_memory import PeakMemory
from lightning_accel.core.step_timeline import StepTally, StepTimeline
from lightning_accel.experiment.subprocess_runner import connect, serve_forks
from lightning_accel.lightning.packages import (
    Callback,
    DummyLogger,
    LightningModule,
    Trainer,
    extract_batch_size,
    own,
    seed_everything,
)
from lightning_accel.lightning.plugin import AccelPlugin
from lightning_accel.search.job import TrialSetup, TuneJob, read
from lightning_accel.settings import without_answers

WARM_UP = 6  # turns for the techniques' trials, first allocations and compilation
_MANY_EPOCHS, _MANY_STEPS = 100_000, 10_000_000
_NO_STEP = 2  # epochs without a batch


@dataclass(frozen=True)
class Ready:
    """The message that a run has started and waits for turns."""

    started_s: float  # seconds from the start to the first few turns
    base_bytes: int  # memory before the first step
    batches: float  # in an epoch; infinite if unknown
    peak_bytes: int  # peak memory since the first step


@dataclass(frozen=True)
class Block:
    """The measurements of some turns."""

    seconds: float  # from the end of the turn before them to the end of the last, waiting for data included
    waited_s: float  # the part of these spent waiting for data
    samples: int  # number of samples trained on
    peak_bytes: int  # peak memory


@dataclass(frozen=True)
class Failed:
    """The message that a run has ended by an error."""

    is_memory: bool
    message: str


class Paced(Callback):
    """Trains as many turns as requested, and waits between two blocks of turns.

    The connection receives a number of turns, 0 for the end, and gets a :class:`Block` for each. A turn is as many
    batches as the job accumulates.
    """

    def __init__(self, connection: Connection, job: TuneJob, started: Stopwatch) -> None:
        self._connection = connection
        self._accumulate, self._batch_size = job.accumulate, job.batch_size or 1
        self._started = started
        self._batches = 0
        self._empty_epochs = 0
        self._turns_left = WARM_UP
        self._is_warm = False

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for config in trainer.lr_scheduler_configs:
            config.strict = False  # without validation, the monitored value may be missing
        self._device = trainer.strategy.root_device
        self._peak = PeakMemory(self._device)
        is_cuda = self._device.type == "cuda"
        self._base_bytes = torch.cuda.memory_allocated(self._device) if is_cuda else psutil.Process().memory_info().rss
        self._restart()

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._empty_epochs += 1
        if self._empty_epochs > _NO_STEP:
            raise RuntimeError(f"the loader gave no batch in {_NO_STEP} epochs")

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if not self._timeline.is_in_step:
            self._timeline.fetch_ended()
        self._empty_epochs = 0

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        samples = _samples_in(batch, self._batch_size)
        self._batches += 1
        self._turns_left -= self._batches % self._accumulate == 0
        if self._turns_left:
            self._timeline.step_ended(samples)
            self._timeline.fetch_began()
            return
        synchronize(self._device)
        self._timeline.step_ended(samples)
        tally, peak_bytes = self._tally, self._peak.peak_bytes()
        answer: Ready | Block
        if self._is_warm:
            answer = Block(sum(tally.cycle_ms) / 1e3, sum(tally.wait_ms) / 1e3, tally.samples, peak_bytes)
        else:
            self._is_warm = True
            batches = float(trainer.num_training_batches)
            answer = Ready(self._started.seconds(), self._base_bytes, batches, peak_bytes)
        self._connection.send(answer)
        self._turns_left = self._connection.recv()
        if not self._turns_left:
            trainer.should_stop = True
        self._restart()

    def _restart(self) -> None:
        self._peak.restart()
        self._tally = StepTally()
        self._timeline = StepTimeline(HostClock(), self._tally.took)
        self._timeline.fetch_began()


def _samples_in(batch: Any, batch_size: int) -> int:
    """Returns the number of samples as Lightning finds it, or the loader's batch size if Lightning finds none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning warns if sizes contradict each other, and takes the first
        try:
            return extract_batch_size(batch)
        except RuntimeError:
            return batch_size


def train(job: TuneJob, setup: TrialSetup, connection: Connection, folder: Path) -> None:
    """Trains under ``setup`` until it is told to stop, and reports an error if there is one.

    The run writes its files to ``folder``.
    """
    started = Stopwatch()
    try:
        job.set_up(setup)
        job.model.configure_callbacks = list  # type: ignore[method-assign]  # they may write files
        seed_everything(0, verbose=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = own(job.model, Trainer)(
                **job.options,
                accumulate_grad_batches=job.accumulate,
                # Schedulers ask for the length of a run: it has one if the user's run has, but is never reached.
                max_epochs=_MANY_EPOCHS if job.max_epochs >= 0 else -1,
                max_steps=_MANY_STEPS if job.max_steps >= 0 else -1,
                limit_val_batches=0,
                num_sanity_val_steps=0,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                default_root_dir=tempfile.mkdtemp(dir=folder),
                # A setup that does not fit must fail, and not change to another one.
                plugins=[AccelPlugin.from_plan(job.plan.replace(memory=without_answers(job.plan.memory)))],
                callbacks=[Paced(connection, job, started)],
            )
            if job.has_logger:
                trainer.loggers = [own(trainer, DummyLogger)()]
            trainer.fit(job.model, job.data)
    except (EOFError, BrokenPipeError):
        return  # the searching process has ended
    except Exception as error:
        traceback.print_exc()
        connection.send(Failed(is_out_of_memory(error), f"{type(error).__name__}: {error}"))
    else:
        connection.send(Failed(False, "the run ended by itself: its loader has no batches, or the module stops it"))


def main() -> None:
    """Reads the job from the file given as argument, and runs it; with forks, once for every setup received."""
    path = Path(sys.argv[1])
    torch.set_num_threads(1)  # a fork lacks its parent's threads, and would wait for them
    job = read(path)

    def run(setup: TrialSetup, connection: Connection) -> None:
        torch.set_num_threads(job.threads)
        torch.set_float32_matmul_precision(job.matmul_precision)
        train(job, setup, connection, path.parent)

    if job.can_fork:
        serve_forks(run)
    else:
        with connect() as connection:
            run(connection.recv(), connection)
