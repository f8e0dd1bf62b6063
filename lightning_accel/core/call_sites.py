"""Reads what a caller's bytecode does around a call, once for each place in the code."""

from __future__ import annotations

import dis
from collections.abc import Callable
from types import CodeType, FrameType
from typing import TypeVar

T = TypeVar("T")

_FILLERS = frozenset({"CACHE", "EXTENDED_ARG", "NOP", "PRECALL", "RESUME"})


def at_call(code: CodeType, offset: int) -> tuple[list[dis.Instruction], int]:
    """Returns the instructions of ``code``, without fillers, and the index of the one at byte ``offset``.

    Keeps fillers that are jump targets. In Python 3.11 the offset of a call points behind its instruction, to a cache
    entry: the index is that of the last instruction before it.
    """
    found = [i for i in dis.get_instructions(code) if i.opname not in _FILLERS or i.is_jump_target]
    return found, sum(i.offset <= offset for i in found) - 1


def variables(instruction: dis.Instruction) -> tuple[str, ...]:
    """Returns the variables of an instruction. Since Python 3.13 some instructions have two."""
    return instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)


def remembered(read: Callable[[CodeType, int], T], at_most: int = 4096) -> Callable[[FrameType], T]:
    """Returns a function of a frame that caches ``read(code, offset)`` for the frame's current place.

    The cache is cleared when it holds ``at_most`` places, since notebooks and compilers keep creating code.
    """
    known: dict[tuple[int, int], tuple[CodeType, T]] = {}

    def of(frame: FrameType) -> T:
        # Keyed by id, since hashing a code object hashes all its contents. Keeping the object keeps its id unique.
        key = id(frame.f_code), frame.f_lasti
        found = known.get(key)
        if found is None:
            if len(known) >= at_most:
                known.clear()
            found = known[key] = frame.f_code, read(frame.f_code, frame.f_lasti)
        return found[1]

    return of
