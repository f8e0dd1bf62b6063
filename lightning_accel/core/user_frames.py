"""Which lines are the user's: those of no library's and none of ours."""

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
# As they are written, and where links lead: code knows the one by which it was imported.
_NOT_THE_USERS = (*{str(place) for written in _PLACES for place in (written, written.resolve())}, "<")


def is_users(file: str) -> bool:
    """Whether a file of code is the user's."""
    return not file.startswith(_NOT_THE_USERS)


def users_line() -> str:
    """The innermost line of the user's that is being run, as ``train.py:12, in forward``; empty: there is none.

    What autograd computes has no frames but those of who called ``backward``.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}, in {frame.f_code.co_name}"
        frame = frame.f_back
    return ""
