"""What the code of a caller says around a call, read from its bytecode once for every place."""

from __future__ import annotations

import dis
from collections.abc import Callable
from types import CodeType, FrameType
from typing import TypeVar

T = TypeVar("T")

_FILLERS = frozenset({"CACHE", "EXTENDED_ARG", "NOP", "PRECALL", "RESUME"})


def at_call(code: CodeType, offset: int) -> tuple[list[dis.Instruction], int]:
    """The instructions of ``code`` that do something or are jumped to, and which of them is at byte ``offset``.

    In Python 3.11 a call of a Python function stands at the cache entries behind its instruction: the last one before.
    """
    found = [i for i in dis.get_instructions(code) if i.opname not in _FILLERS or i.is_jump_target]
    return found, sum(i.offset <= offset for i in found) - 1


def variables(instruction: dis.Instruction) -> tuple[str, ...]:
    """The variables of an instruction, of which some have two since Python 3.13."""
    return instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)


def remembered(read: Callable[[CodeType, int], T], at_most: int = 4096) -> Callable[[FrameType], T]:
    """``read(code, offset)`` of the place where a frame is, each read once.

    Of more places than ``at_most`` all are forgotten, since a notebook or a compiler makes code over and over.
    """
    known: dict[tuple[int, int], tuple[CodeType, T]] = {}

    def of(frame: FrameType) -> T:
        # By identity, since hashing a code object hashes all that it holds. It is kept, so that no other takes its id.
        key = id(frame.f_code), frame.f_lasti
        found = known.get(key)
        if found is None:
            if len(known) >= at_most:
                known.clear()
            found = known[key] = frame.f_code, read(frame.f_code, frame.f_lasti)
        return found[1]

    return of
