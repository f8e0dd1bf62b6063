"""Tells which lines of code are the user's: outside of libraries and this package."""

from __future__ import annotations

import functools
import signal
import sys
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import torch

from lightning_accel.core.checks import SettingError
from lightning_accel.core.report import AccelError

_PLACES = [
    *(Path(sysconfig.get_path(name)) for name in ("purelib", "platlib", "stdlib")),
    *(Path(torch.__file__).parents[1], Path(__file__).parents[1]),
]
# Both as written and with links resolved: code records the path by which it was imported.
_NOT_THE_USERS = (*{str(place) for written in _PLACES for place in (written, written.resolve())}, "<")

_LIGHTNINGS = ("lightning.", "pytorch_lightning.", "lightning_fabric.")
_NO_LIBRARYS = (*_LIGHTNINGS, "torch.", "lightning_accel.")
_STANDARD = {"torch", *sys.stdlib_module_names}


def is_users(file: str) -> bool:
    """Returns whether a file of code is the user's."""
    return not file.startswith(_NOT_THE_USERS)


def users_line() -> str:
    """Returns the user's innermost running line, as ``train.py:12, in forward``; empty if there is none.

    In a LightningModule of a library's, it is the library's line: the user's would be that of ``trainer.fit``. In a
    backward pass, the only Python frames are those of the code that called ``backward``.
    """
    frame: FrameType | None = sys._getframe(1)
    librarys: FrameType | None = None  # the innermost one
    while frame is not None and not is_users(frame.f_code.co_filename):
        name = str(frame.f_globals.get("__name__"))
        if librarys is not None and name.startswith(_LIGHTNINGS):
            frame = librarys
            break
        if librarys is None and not name.startswith(_NO_LIBRARYS) and name.partition(".")[0] not in _STANDARD:
            librarys = frame
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}, in {frame.f_code.co_name}"


def is_event(error: BaseException) -> bool:
    """Returns whether an error tells of an event outside of the step, and may not come again if that is repeated.

    The handler of a signal has raised it, or the user's code has met an error of the system.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    handlers = filter(callable, map(signal.getsignal, signal.valid_signals()))
    if not {*map(_code_of, handlers)}.isdisjoint(frame.f_code for frame in frames):
        return True
    # Whether the user's code or this package has called what failed, a function of a library's, say.
    callers = (_is_users_frame(frame) for frame in reversed(frames) if _is_users_frame(frame) or is_ours(frame))
    return isinstance(error, OSError) and next(callers, False)


def _is_users_frame(frame: FrameType) -> bool:
    # What is typed in, or given by `python -c`, has no file.
    return is_users(frame.f_code.co_filename) or frame.f_globals.get("__name__") == "__main__"


def is_ours(frame: FrameType) -> bool:
    """Returns whether a frame runs this package's code."""
    return str(frame.f_globals.get("__name__")).startswith("lightning_accel.")


def is_for_the_user(error: BaseException) -> bool:
    """Returns whether an error that came out of this library has to reach the user.

    It says what the user can do, is a warning that the user has made an error, or tells of an event.
    """
    return isinstance(error, (SettingError, AccelError, Warning)) or is_event(error)


def _code_of(function: Callable[..., object]) -> object:
    while isinstance(function, functools.partial):
        function = function.func
    call = function if hasattr(function, "__code__") else type(function).__call__
    return getattr(call, "__code__", None)
