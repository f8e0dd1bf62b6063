"""A process that takes turns with others: its clocks stand still while another has the turn."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

_now_ns = time.monotonic_ns
_away_ns = 0


def hold_clocks() -> None:
    """Has Python's clocks leave out the waiting. Call it before anything takes a clock from :mod:`time`."""
    for name in ("perf_counter", "monotonic"):
        clock_ns = getattr(time, f"{name}_ns")

        def held_ns(clock_ns: Callable[[], int] = clock_ns) -> int:
            return clock_ns() - _away_ns

        def held(held_ns: Callable[[], int] = held_ns) -> float:
            return held_ns() / 1e9

        setattr(time, f"{name}_ns", held_ns)
        setattr(time, name, held)


def await_turn(*told: float) -> None:
    """Prints ``turn`` and what is ``told``, and returns when a line has come in."""
    global _away_ns
    print("turn", *told, flush=True)
    left_ns = _now_ns()
    sys.stdin.readline()
    _away_ns += _now_ns() - left_ns
