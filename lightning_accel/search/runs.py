"""Runs on trial, from this side: started, given turns, and ended."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any

from lightning_accel.core.clocks import Deadline
from lightning_accel.search.job import TuneJob
from lightning_accel.search.setup import TrialSetup
from lightning_accel.search.worker import AUTHKEY, Block, Failed, Ready

_MOMENT_S = 0.2
_KILL = getattr(signal, "SIGKILL", signal.SIGTERM)  # which Windows does not have


class TrialRunError(Exception):
    """A run on trial has ended before its time."""

    def __init__(self, message: str, *, is_memory: bool = False) -> None:
        super().__init__(message)
        self.is_memory = is_memory  # whether it asked for more memory than there is


@dataclass
class _Process:
    popen: subprocess.Popen[bytes]
    connection: Connection


class WorkerProcesses:
    """The processes in which runs are made, each with the job read: one for every environment.

    Raises:
        ValueError: It cannot be copied.
    """

    def __init__(self, job: TuneJob, patience_s: float) -> None:
        self.patience_s = patience_s
        self._folder = tempfile.TemporaryDirectory(prefix="lightning-accel-")
        self._log = Path(self._folder.name) / "log"
        self._path = Path(self._folder.name) / "job"
        job.write(self._path)
        # Where a device is in use, a process that has only imported things has touched it already.
        self._can_fork = sys.platform == "linux" and job.options.get("accelerator") == "cpu"
        self._key = secrets.token_bytes(16)
        self._server = socket.create_server(("127.0.0.1", 0))
        self._server.settimeout(_MOMENT_S)
        self._forked: dict[str, _Process] = {}
        self._all: list[subprocess.Popen[bytes]] = []  # also those that have not come far enough to be talked to
        self._runs: list[TrialRun] = []

    def start(self, setup: TrialSetup) -> TrialRun:
        """A run under ``setup``, warm, and waiting for turns.

        Raises:
            TrialRunError: It does not train.
        """
        name = repr(sorted(setup.environment.items()))
        process = self._forked.get(name) or self._process(setup.environment)
        try:
            process.connection.send((setup, self._can_fork))
            pid = process.connection.recv() if self._can_fork else process.popen.pid
        except (EOFError, OSError):
            raise TrialRunError(f"its process ended at once: {self._last_words()}") from None
        if self._can_fork:
            self._forked[name] = process
        run = TrialRun(self, process, pid)
        self._runs.append(run)
        run.connection = self.accept(process.popen)
        run.ready = run.answer()
        run.most_bytes = run.ready.peak_bytes
        return run

    def close(self) -> None:
        """Ends all processes, at whichever moment."""
        for run in self._runs:
            run.kill()
        for popen in self._all:
            popen.kill()
            popen.wait()
        self._server.close()
        self._folder.cleanup()

    def accept(self, popen: subprocess.Popen[bytes]) -> Connection:
        """The connection that a process opens once it has come so far."""
        deadline = Deadline(self.patience_s)
        while not deadline.is_over():
            with suppress(TimeoutError):
                connection = Connection(self._server.accept()[0].detach())
                deliver_challenge(connection, self._key)
                answer_challenge(connection, self._key)
                return connection
            if popen.poll() is not None:
                raise TrialRunError(f"its process ended at once: {self._last_words()}")
        raise TrialRunError(f"its process did not begin within {self.patience_s:.0f} s: {self._last_words()}")

    def status(self, process: _Process, pid: int) -> int:
        """With which status a run's process has ended."""
        if not self._can_fork:
            return process.popen.wait()
        try:
            process.connection.send(pid)
            return int(process.connection.recv())
        except (EOFError, OSError):  # whoever would know is gone, too
            return -1

    def _process(self, environment: Mapping[str, str]) -> _Process:
        # Not as a program of its own: what it sends would be of classes of another name.
        command = [sys.executable, "-c", "from lightning_accel.search.worker import main; main()"]
        with self._log.open("ab") as log:
            popen = subprocess.Popen(
                [*command, str(self._path), str(self._server.getsockname()[1])],
                env={**os.environ, **environment, AUTHKEY: self._key.hex()},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for this process alone
            )
        self._all.append(popen)
        return _Process(popen, self.accept(popen))

    def _last_words(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"


class TrialRun:
    """One training under a setup, which waits between two blocks of turns."""

    ready: Ready  # what it said when it was warm
    connection: Connection

    def __init__(self, workers: WorkerProcesses, process: _Process, pid: int) -> None:
        self._workers, self._process, self._pid = workers, process, pid
        self.is_over = False  # whether it has ended
        self.most_bytes = 0  # the most memory that it has held, its first steps among them

    def block(self, turns: int) -> Block:
        """Has it train for so many turns.

        Raises:
            TrialRunError: It has ended.
        """
        with suppress(OSError):  # why it is gone, the answer says
            self.connection.send(turns)
        answer: Block = self.answer()
        self.most_bytes = max(self.most_bytes, answer.peak_bytes)
        return answer

    def answer(self) -> Any:
        """What it says next.

        Raises:
            TrialRunError: It has ended, or says nothing for a long time.
        """
        if not self.connection.poll(self._workers.patience_s):
            self.close()
            raise TrialRunError(f"it did not answer within {self._workers.patience_s:.0f} s")
        try:
            answer = self.connection.recv()
        except (EOFError, OSError):
            self.is_over = True
            status = self._workers.status(self._process, self._pid)
            # What the system does to a process that has taken all memory.
            raise TrialRunError(f"its process ended with status {status}", is_memory=status == -_KILL) from None
        if isinstance(answer, Failed):
            self.is_over = True
            raise TrialRunError(answer.message, is_memory=answer.is_memory)
        return answer

    def close(self) -> None:
        """Ends it, and waits until its memory is free."""
        if self.kill():
            self._workers.status(self._process, self._pid)
            self.connection.close()

    def kill(self) -> bool:
        """Ends it at once; whether it was still there."""
        was_there, self.is_over = not self.is_over, True
        if was_there:
            with suppress(ProcessLookupError):
                os.kill(self._pid, _KILL)
        return was_there
