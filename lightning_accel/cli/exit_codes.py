"""How commands that run the user's code end where they cannot go on: a line, and a status that nothing else has."""

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


def ended(command: str, work: Callable[[], int]) -> int:
    """What ``work`` returns; where it is stopped or fails one line, and the status that says so."""
    try:
        with sigterm_raises():
            return work()
    except (KeyboardInterrupt, Terminated) as stopped:
        _say(command, "stopped; nothing was left behind.")
        return TERMINATED if isinstance(stopped, Terminated) else INTERRUPTED
    except Exception as error:  # whatever the user's model, data or metric raises where we call it
        _say(command, _in_words(error))
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
    from lightning_accel.deploy.errors import ExportError, QuantizeError, in_words, users_line_of
    from lightning_accel.deploy.int8 import MissingPackageError

    if isinstance(error, CheckpointError | ExportError | QuantizeError | MissingPackageError):
        return str(error)
    line = users_line_of(error)
    said = str(error) if isinstance(error, ValueError | OSError) and str(error) else in_words(error)
    return f"{said} ({line})" if line and line not in said else said
