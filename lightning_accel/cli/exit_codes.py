"""How commands end that cannot go on: with one line, and a status that nothing else has."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

FAILED, INTERRUPTED, TERMINATED = 2, 130, 143
"""Exit statuses; the latter two are 128 and the signal's number, as shells have them."""


class Terminated(BaseException):
    """SIGTERM has come."""


def ended(command: str, work: Callable[[], int], *, runs_users_code: bool = False) -> int:
    """Returns what ``work`` returns. If it is stopped or fails, says so in one line and returns the status for that.

    Args:
        command: The subcommand, for the line.
        work: What it does.
        runs_users_code: Whether any exception may be the user's own. Otherwise ``ValueError`` and ``OSError`` are the
            only ones that say something to a user.
    """
    expected: tuple[type[Exception], ...] = (Exception,) if runs_users_code else (ValueError, OSError)
    try:
        with sigterm_raises():
            return work()
    except (KeyboardInterrupt, Terminated) as stopped:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second Ctrl-C ends what still winds up
        _say(command, "stopped; nothing was left behind.")
        return TERMINATED if isinstance(stopped, Terminated) else INTERRUPTED
    except expected as error:
        _say(command, _in_words(error) if runs_users_code else str(error))
        return FAILED


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """Lets what is under way clean up after itself: else the process is gone at once and its files stay."""
    if threading.current_thread() is not threading.main_thread():  # where Python lets nobody set a handler
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
    """What is wrong, and the line of the user's code where that is not said yet."""
    from lightning_accel.cli.users_code import CheckpointError
    from lightning_accel.deploy.errors import ExportError, MissingPackageError, QuantizeError, in_words, users_line_of

    if isinstance(error, CheckpointError | ExportError | QuantizeError | MissingPackageError):
        return str(error)
    line = users_line_of(error)
    said = str(error) if isinstance(error, ValueError | OSError) and str(error) else in_words(error)
    return f"{said} ({line})" if line and line not in said else said
