"""What is read of a caller's code is read once for every place, and does not pile up."""

from __future__ import annotations

import sys
from types import CodeType

from lightning_accel.core.call_sites import remembered


def test_a_place_is_read_once_and_every_place_by_itself() -> None:
    read: list[tuple[CodeType, int]] = []

    def offset_of(code: CodeType, offset: int) -> int:
        read.append((code, offset))
        return offset

    asked = remembered(offset_of)
    found = [(asked(sys._getframe()), asked(sys._getframe())) for _ in range(3)]

    assert len(set(found)) == 1
    assert found[0][0] != found[0][1]
    assert len(read) == 2


def test_code_that_is_made_over_and_over_does_not_pile_up() -> None:
    read: list[CodeType] = []
    asked = remembered(lambda code, offset: read.append(code), at_most=4)
    frames = []
    for _ in range(5):
        exec("frames.append(sys._getframe())", {"frames": frames, "sys": sys})
        asked(frames[-1])

    asked(frames[0])

    assert read[-1] is frames[0].f_code
    assert len(read) == 6
