"""Other processes: each starts in a group of its own, can exchange messages, and ends with all that it has started."""

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
from typing import Any

from typing_extensions import Self, override

from lightning_accel.core.clocks import Deadline

_PARENT = "LIGHTNING_ACCEL_PARENT"  # by which a worker finds the process that has started it
_PATIENCE_S, _MOMENT_S = 10.0, 0.2
_KILL = getattr(signal, "SIGKILL", signal.SIGTERM)  # which Windows does not have


class SubprocessError(OSError):
    """A process has ended before it was told to, or does not answer."""

    def __init__(self, message: str, *, is_memory: bool = False, is_late: bool = False) -> None:
        super().__init__(message)
        self.is_memory = is_memory  # whether it asked for more memory than there is
        self.is_late = is_late  # whether it may only have needed more time


class _Forked:
    """What a worker's fork has of ``Popen``."""

    def __init__(self, pid: int, worker: Worker) -> None:
        self.pid, self._worker = pid, worker
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            try:
                self.returncode = int(self._worker.ask(self.pid))
            except SubprocessError:  # whoever would know is gone, too
                self.returncode = -1
        return self.returncode

    def poll(self) -> int | None:
        return self.returncode


class Subprocess:
    """A program in another process, which is ended at the end of the ``with`` block, however that block ends.

    Args:
        command: The program and its arguments.
        environment: All its variables; None if it has those of this process.
        folder: The folder that it starts in; None if that is this process's.
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
            start_new_session=True,  # Ctrl-C is for this process alone
        )
        os.close(output)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def wait(self) -> int:
        """The status with which it ends by itself."""
        return self._popen.wait()

    def end(self, patience_s: float = _PATIENCE_S) -> None:
        """Ends it and all that it has started; asks it to end by itself before, if there is patience."""
        if self._popen.returncode is not None:  # by now another process may have its number
            return
        try:
            if patience_s:
                _signal(self._popen.pid, signal.SIGTERM)
                with suppress(subprocess.TimeoutExpired):
                    self._popen.wait(patience_s)
        finally:
            _signal(self._popen.pid, _KILL)  # whoever is left of its group
            self._popen.wait()

    def last_lines(self, count: int) -> list[str]:
        """What it has said at last."""
        return self._output.read_text(encoding="utf-8", errors="replace").splitlines()[-count:]


class Worker(Subprocess):
    """A program that calls :func:`connect` or :func:`serve_forks`, and is told by messages what to do.

    Args:
        program: In Python.
        arguments: Of the program.
        environment: Variables that it has beside those of this process.
        patience_s: How long it may take until it connects, and for an answer.
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
        """A process that begins where the program calls :func:`serve_forks`, and does its work with ``message``.

        Raises:
            SubprocessError: It does not begin.
        """
        worker = copy.copy(self)
        worker._popen = _Forked(self.ask(message), self)
        try:
            worker.connection = self._accepted()
        except BaseException:
            worker.end(0)
            raise
        return worker

    @functools.cached_property
    def connection(self) -> Connection:
        return self._accepted()

    def ask(self, message: Any) -> Any:
        """Sends a message and returns the answer; raises as :meth:`answer` does."""
        self.send(message)
        return self.answer()

    def send(self, message: Any) -> None:
        """Sends a message. Whether it has arrived, the answer tells."""
        with suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send(message)

    def answer(self) -> Any:
        """What it sends next.

        Raises:
            SubprocessError: It has ended, or says nothing for a long time.
        """
        try:
            if self.connection.poll(self._patience_s):
                return self.connection.recv()
        except (EOFError, ConnectionError):
            status = self.wait()
            # The system kills a process that has taken all memory.
            raise SubprocessError(f"its process ended with status {status}", is_memory=status == -_KILL) from None
        self.end()
        raise SubprocessError(f"it did not answer within {self._patience_s:.0f} s", is_late=True)

    @override
    def end(self, patience_s: float = 0) -> None:
        """Ends it and all that it has started, at once."""
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
    """In a worker's process: the connection to the process that has started it."""
    port, authkey = os.environ[_PARENT].split()
    return Client(("127.0.0.1", int(port)), authkey=bytes.fromhex(authkey))


def serve_forks(work: Callable[[Any, Connection], None]) -> None:
    """In a worker's process: forks it for each message, and does ``work`` with the message there.

    A number asks for the status with which the fork of that number has ended.
    """
    with connect() as parent:
        while True:
            try:
                message = parent.recv()
            except EOFError:
                return
            if isinstance(message, int):
                parent.send(os.waitstatus_to_exitcode(os.waitpid(message, 0)[1]))
                continue
            pid = os.fork()
            if not pid:
                break
            os.setpgid(pid, pid)
            parent.send(pid)
    with connect() as connection:
        work(message, connection)
    sys.stdout.flush()
    os._exit(0)  # a fork must not run what its parent has registered for its own end


def _signal(group: int, number: int) -> None:
    with suppress(ProcessLookupError):
        (os.kill if sys.platform == "win32" else os.killpg)(group, number)
