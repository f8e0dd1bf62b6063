"""Other processes: each runs in its own process group, can exchange messages, and ends with all its children."""

from __future__ import annotations

import copy
import functools
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any, cast

from typing_extensions import Self, override

from lightning_accel.core.clocks import Deadline

_PARENT = "LIGHTNING_ACCEL_PARENT"  # tells a worker how to reach the process that has started it
_PATIENCE_S, _MOMENT_S = 10.0, 0.2
_KILL = getattr(signal, "SIGKILL", signal.SIGTERM)  # Windows has no SIGKILL


class SubprocessError(OSError):
    """A process has ended too early, or does not answer."""

    def __init__(self, message: str, *, is_memory: bool = False, is_late: bool = False) -> None:
        super().__init__(message)
        self.is_memory = is_memory  # whether the process ran out of memory
        self.is_late = is_late  # whether the process may only have needed more time


class _Forked:
    """The part of ``Popen``'s interface that a worker's fork has."""

    def __init__(self, pid: int, worker: Worker) -> None:
        self.pid, self._worker = pid, worker
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        return cast(int, self._status(self.pid))

    def poll(self) -> int | None:
        return self._status(-self.pid)

    def _status(self, question: int) -> int | None:
        if self.returncode is None:
            try:
                self.returncode = self._worker.ask(question)
            except OSError:  # the parent, which knows the status, has ended, too
                self.returncode = -1
        return self.returncode


class Subprocess:
    """A program in another process, which ends with the ``with`` block, also after an exception.

    Args:
        command: The program and its arguments.
        environment: All its variables. If None, those of this process.
        folder: Its working folder. If None, this process's.
    """

    def __init__(
        self, command: Sequence[str], *, environment: Mapping[str, str] | None = None, folder: Path | None = None
    ) -> None:
        output, name = tempfile.mkstemp(prefix="lightning-accel-")
        self._output = Path(name)
        weakref.finalize(self, self._output.unlink, missing_ok=True)
        self._popen: subprocess.Popen[bytes] | _Forked = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches this process only
        )
        os.close(output)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def wait(self) -> int:
        """Waits for the process to end; returns its exit status."""
        return self._popen.wait()

    def end(self, patience_s: float = _PATIENCE_S) -> None:
        """Ends the process and all its children. Unless ``patience_s`` is 0, asks the process to end itself first."""
        if self._popen.returncode is not None:  # another process may have the number by now
            return
        try:
            if patience_s:
                _signal(self._popen.pid, signal.SIGTERM)
                with suppress(subprocess.TimeoutExpired):
                    self._popen.wait(patience_s)
        finally:
            _signal(self._popen.pid, _KILL)  # the remaining processes of its group
            self._popen.wait()

    def last_lines(self, count: int) -> list[str]:
        """Returns the last lines of its output."""
        return self._output.read_text(encoding="utf-8", errors="replace").splitlines()[-count:]


class Worker(Subprocess):
    """A Python program that calls :func:`connect` or :func:`serve_forks`, and is controlled by messages.

    Args:
        program: The program's source code.
        arguments: The program's arguments.
        environment: Variables in addition to those of this process.
        patience_s: Seconds to wait until it connects, and for each answer.
    """

    def __init__(
        self, program: str, *arguments: str, environment: Mapping[str, str] | None = None, patience_s: float
    ) -> None:
        self._patience_s = patience_s
        self._authkey = secrets.token_bytes(16)
        self._server = socket.create_server(("127.0.0.1", 0))
        self._server.settimeout(_MOMENT_S)
        parent = f"{self._server.getsockname()[1]} {self._authkey.hex()}"
        variables = {**os.environ, **(environment or {}), _PARENT: parent}
        super().__init__([sys.executable, "-c", program, *arguments], environment=variables)

    def fork(self, message: Any) -> Worker:
        """Forks the worker where its program calls :func:`serve_forks`; the fork does its work with ``message``.

        Raises:
            SubprocessError: The fork does not start.
        """
        worker = copy.copy(self)
        vars(worker).pop("connection", None)  # this worker's own
        worker._popen = _Forked(self.ask(message), self)
        try:
            worker.connection = worker._accepted()
        except BaseException:
            worker.end(0)
            raise
        return worker

    @functools.cached_property
    def connection(self) -> Connection:
        return self._accepted()

    def ask(self, message: Any) -> Any:
        """Sends a message and returns the answer. Raises the errors of :meth:`answer`."""
        self.send(message)
        return self.answer()

    def send(self, message: Any) -> None:
        """Sends a message. Only the answer shows whether it has arrived."""
        with suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send(message)

    def answer(self) -> Any:
        """Returns the next message from the process.

        Raises:
            SubprocessError: The process has ended, or sends nothing for ``patience_s``.
        """
        try:
            if self.connection.poll(self._patience_s):
                return self.connection.recv()
        except (EOFError, ConnectionError):
            status = self.wait()
            # The system kills a process that uses up all memory.
            raise SubprocessError(f"its process ended with status {status}", is_memory=status == -_KILL) from None
        self.end()
        raise SubprocessError(f"it did not answer within {self._patience_s:.0f} s", is_late=True)

    @override
    def end(self, patience_s: float = 0) -> None:
        """Ends the process and all its children immediately."""
        super().end(patience_s)
        if "connection" in vars(self):
            self.connection.close()
        if not isinstance(self._popen, _Forked):
            self._server.close()

    def _accepted(self) -> Connection:
        deadline = Deadline(self._patience_s)
        while not deadline.is_over():
            with suppress(TimeoutError):
                connection = Connection(self._server.accept()[0].detach())
                deliver_challenge(connection, self._authkey)
                answer_challenge(connection, self._authkey)
                return connection
            if self._popen.poll() is not None:
                break
        ended = self._popen.returncode is not None
        how = "ended at once" if ended else f"did not begin within {self._patience_s:.0f} s"
        said = "".join(self.last_lines(1)) or "it said nothing"
        raise SubprocessError(f"its process {how}: {said}", is_late=not ended)


def connect() -> Connection:
    """Returns, in a worker's process, the connection to the process that has started it."""
    port, authkey = os.environ[_PARENT].split()
    return Client(("127.0.0.1", int(port)), authkey=bytes.fromhex(authkey))


def serve_forks(work: Callable[[Any, Connection], None]) -> None:
    """Forks the worker's process for each message, and calls ``work`` with the message in the fork.

    A number asks for the exit status of the fork with that process number. If it is negative, nobody waits for the end.
    """
    with connect() as parent:
        while True:
            try:
                message = parent.recv()
            except EOFError:
                return
            if isinstance(message, int):
                ended, status = os.waitpid(abs(message), 0 if message > 0 else os.WNOHANG)
                parent.send(os.waitstatus_to_exitcode(status) if ended else None)
                continue
            pid = os.fork()
            if not pid:
                break
            os.setpgid(pid, pid)
            parent.send(pid)
    with connect() as connection:
        work(message, connection)
    sys.stdout.flush()
    os._exit(0)  # a fork must not run its parent's exit handlers


def _signal(group: int, number: int) -> None:
    with suppress(ProcessLookupError):
        (os.kill if sys.platform == "win32" else os.killpg)(group, number)
