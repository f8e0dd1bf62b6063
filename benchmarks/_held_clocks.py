"""Clocks that stand still while another process has the turn.

A shared machine's speed changes from minute to minute: processes that take turns meet it alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_now_ns = time.monotonic_ns
_away_ns = 0


def hold_clocks() -> None:
    """Has Python's clocks leave out what passes in :func:`standing`. Call it before others take them from ``time``."""
    for name in ("perf_counter", "monotonic"):
        clock_ns = getattr(time, f"{name}_ns")

        def held_ns(clock_ns: Callable[[], int] = clock_ns) -> int:
            return clock_ns() - _away_ns

        def held(held_ns: Callable[[], int] = held_ns) -> float:
            return held_ns() / 1e9

        setattr(time, f"{name}_ns", held_ns)
        setattr(time, name, held)


@contextmanager
def standing() -> Iterator[None]:
    """The clocks stand still within."""
    global _away_ns
    left_ns = _now_ns()
    yield
    _away_ns += _now_ns() - left_ns
