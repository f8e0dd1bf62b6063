"""Runs on trial, from this side: started, given turns, and ended."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from lightning_accel.experiment.subprocess_runner import SubprocessError, Worker
from lightning_accel.search.job import TuneJob
from lightning_accel.search.setup import TrialSetup
from lightning_accel.search.worker import Block, Failed, Ready

# Not as a program of its own: what it sends would be of classes of another name.
_PROGRAM = "from lightning_accel.search.worker import main; main()"


class WorkerProcesses:
    """The processes in which runs are made. Those of one environment are forks of one process, which has read the job.

    Raises:
        ValueError: The job cannot be copied.
    """

    def __init__(self, job: TuneJob, patience_s: float) -> None:
        self._patience_s, self._can_fork = patience_s, job.can_fork
        self._folder = tempfile.TemporaryDirectory(prefix="lightning-accel-")
        job.write(Path(self._folder.name) / "job")
        self._forked: dict[str, Worker] = {}
        self._all: list[Worker] = []

    def start(self, setup: TrialSetup) -> TrialRun:
        """A run under ``setup``, warm, and waiting for turns.

        Raises:
            SubprocessError: It does not train.
        """
        name = repr(sorted(setup.environment.items()))
        if (worker := self._forked.get(name)) is None:
            path = str(Path(self._folder.name) / "job")
            worker = Worker(_PROGRAM, path, environment=setup.environment, patience_s=self._patience_s)
            self._all.append(worker)
        if not self._can_fork:
            worker.send(setup)
            return TrialRun(worker)
        self._forked[name] = worker
        self._all.insert(0, fork := worker.fork(setup))  # a fork ends before the process that knows of its end
        return TrialRun(fork)

    def close(self) -> None:
        """Ends all processes, at whichever moment."""
        for worker in self._all:
            worker.end()
        self._folder.cleanup()


class TrialRun:
    """One training under a setup, which waits between two blocks of turns.

    Raises:
        SubprocessError: It does not begin.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.is_over = False  # whether it has ended
        self.ready: Ready = self._answer()  # what it said when it was warm
        self.most_bytes: int = self.ready.peak_bytes  # the most memory that it has held, its first steps among them

    def block(self, turns: int) -> Block:
        """Has it train for so many turns.

        Raises:
            SubprocessError: It has ended.
        """
        self._worker.send(turns)
        answer: Block = self._answer()
        self.most_bytes = max(self.most_bytes, answer.peak_bytes)
        return answer

    def close(self) -> None:
        """Ends it, and waits until its memory is free."""
        self.is_over = True
        self._worker.end()

    def _answer(self) -> Any:
        try:
            answer = self._worker.answer()
            if isinstance(answer, Failed):
                raise SubprocessError(answer.message, is_memory=answer.is_memory)
        except SubprocessError:
            self.is_over = True
            raise
        return answer
