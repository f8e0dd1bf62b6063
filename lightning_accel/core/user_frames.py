"""Tells which lines of code are the user's: outside of libraries and this package."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from types import FrameType

import torch

_PLACES = [
    *(Path(sysconfig.get_path(name)) for name in ("purelib", "platlib", "stdlib")),
    *(Path(torch.__file__).parents[1], Path(__file__).parents[1]),
]
# Both as written and with links resolved: code records the path by which it was imported.
_NOT_THE_USERS = (*{str(place) for written in _PLACES for place in (written, written.resolve())}, "<")


def is_users(file: str) -> bool:
    """Returns whether a file of code is the user's."""
    return not file.startswith(_NOT_THE_USERS)


def users_line() -> str:
    """Returns the user's innermost running line, as ``train.py:12, in forward``; empty if there is none.

    In a backward pass, the only Python frames are those of the code that called ``backward``.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}, in {frame.f_code.co_name}"
        frame = frame.f_back
    return ""
