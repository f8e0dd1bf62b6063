"""How commands end when they cannot continue: with one line of output and a distinct exit status."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

FAILED, INTERRUPTED, TERMINATED = 2, 130, 143
"""Exit statuses. The latter two are 128 plus the signal's number, as in shells."""


class Terminated(BaseException):
    """The process has received SIGTERM."""


def ended(command: str, work: Callable[[], int], *, runs_users_code: bool = False) -> int:
    """Returns the result of ``work``. If it is stopped or fails, prints one line and returns the status for that.

    Args:
        command: The subcommand, for the line.
        work: The function to run.
        runs_users_code: Whether any exception may come from the user's code. Otherwise only ``ValueError`` and
            ``OSError`` are reported to the user.
    """
    expected: tuple[type[Exception], ...] = (Exception,) if runs_users_code else (ValueError, OSError)
    try:
        with sigterm_raises():
            return work()
    except (KeyboardInterrupt, Terminated) as stopped:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second Ctrl-C ends the cleanup
        _say(command, "stopped; nothing was left behind.")
        return TERMINATED if isinstance(stopped, Terminated) else INTERRUPTED
    except expected as error:
        _say(command, _in_words(error) if runs_users_code else str(error))
        return FAILED


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """Makes SIGTERM raise, so that running code can clean up. Otherwise the process dies and leaves its files."""
    if threading.current_thread() is not threading.main_thread():  # Python allows handlers in the main thread only
        yield
        return
    before = signal.signal(signal.SIGTERM, _raise)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _raise(*_: Any) -> NoReturn:
    raise Terminated


def _say(command: str, line: str) -> None:
    print(f"lightning-accel {command}: {line}", file=sys.stderr)


def _in_words(error: Exception) -> str:
    """Describes the error, with the user's line of code unless the message has it."""
    from lightning_accel.cli.users_code import CheckpointError
    from lightning_accel.deploy.errors import ExportError, MissingPackageError, QuantizeError, in_words, users_line_of

    if isinstance(error, CheckpointError | ExportError | QuantizeError | MissingPackageError):
        return str(error)
    line = users_line_of(error)
    said = str(error) if isinstance(error, ValueError | OSError) and str(error) else in_words(error)
    return f"{said} ({line})" if line and line not in said else said
