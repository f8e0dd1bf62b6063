"""Training runs that take turns, each in a process of its own: the parent's side.

A run trains for one epoch when it is its turn, and sleeps until its next. What it measures about an epoch it tells at
the end of the turn, so that runs can be compared turn by turn: a busy minute of the machine hits all of them alike.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_accel.callbacks import EpochSpeed


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run to be made.

    Attributes:
        name: Of what is trained; to ``_training``, a module of this folder with a function ``train``.
        mode: ``"plain"`` or ``"accelerated"``.
        accelerator: As in Lightning's Trainer.
        log_dir: Where logs go.
        options: What else its ``train`` is given.
        worker: The module whose ``train(job, pipe)`` is the run, in its process.
        has_children: Whether it starts processes of its own, as loaders with workers do.
    """

    name: str
    mode: str
    accelerator: str
    log_dir: Path
    options: dict[str, Any] = field(default_factory=dict)
    worker: str = "_training"
    has_children: bool = False

    @property
    def folder(self) -> Path:
        """Where its own logs go."""
        return self.log_dir / self.name / self.mode


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a run has come to.

    Attributes:
        first_loss: Validation loss before any training.
        final_loss: Validation loss after the last turn.
        final_accuracy: Validation accuracy after the last turn, where the model has one.
        summary: A line a technique, in the words of the report; empty for a plain run.
        report: The whole report as plain values; None for a plain run.
    """

    first_loss: float
    final_loss: float
    final_accuracy: float | None
    summary: str = ""
    report: dict[str, Any] | None = None


class Run:
    """A run in a process of its own, as the parent sees it: :meth:`wait_for_gate`, then turns, then its outcome."""

    def __init__(self, job: Job) -> None:
        self.job = job
        context = multiprocessing.get_context("spawn")  # neither memory nor threads come from this process
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(job, theirs), daemon=not job.has_children)
        self._process.start()
        theirs.close()  # or its end would never be seen here

    def wait_for_gate(self) -> None:
        """Until it has built its model and is ready to train."""
        self._receive()

    def take_turn(self) -> EpochSpeed:
        """Lets it train for one epoch, and waits for the end of that."""
        self._pipe.send(None)
        measured: EpochSpeed = self._receive()
        return measured

    def outcome(self) -> Outcome:
        """Lets it end, after its last turn: its end is work too, which is not to fall into another's turn."""
        self._pipe.send(None)
        outcome: Outcome = self._receive()
        self._process.join()
        return outcome

    def close(self) -> None:
        """Ends its process, if it has not ended; by force, for Lightning answers a request only after the next step."""
        self._process.kill()
        self._process.join()

    def _receive(self) -> Any:
        try:
            return self._pipe.recv()
        except (EOFError, ConnectionResetError):
            self._process.join()
            printed = _output(self.job).read_text(encoding="utf-8", errors="replace")
            sys.exit(f"{self.job.name}, {self.job.mode} failed:\n{printed}")


def _output(job: Job) -> Path:
    return job.folder / "output.txt"


def _work(job: Job, pipe: Connection) -> None:
    """The child. What it prints goes to a file, for the screen is the parent's."""
    job.folder.mkdir(parents=True, exist_ok=True)
    with _output(job).open("wb") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    # Left to themselves, threads of OpenMP sleep milliseconds after their last work; told to wait actively, they would
    # take the core of the run whose turn it is.
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        os.environ.pop(name, None)
    os.environ["LIGHTNING_ACCEL_CACHE"] = str(job.folder / "cache")  # a first run, whatever earlier ones have settled
    # Imported here: the parent needs nothing of it, and OpenMP reads its settings when torch is loaded.
    importlib.import_module(job.worker).train(job, pipe)
