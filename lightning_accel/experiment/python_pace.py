"""How fast this machine runs Python: estimates of what setting up takes are made for one machine, and scaled by it."""

from __future__ import annotations

import ast
import functools

from lightning_accel.core.clocks import Stopwatch

_TEXT = "x = [f(a, *b, c=d) for a, b in e if a < 1]\n" * 5
_OF_THE_ESTIMATES_S = 2.4e-4  # an Intel Xeon (Emerald Rapids) of 2026, Python 3.11


@functools.cache
def python_pace() -> float:
    """Returns how many times as long Python takes here as where the estimates were made. Takes a millisecond, once."""
    took = []
    for _ in range(4):
        stopwatch = Stopwatch(of_thread=True)  # processes that start beside this one say nothing about it
        ast.unparse(ast.parse(_TEXT))  # many small calls of Python code, as in TorchDynamo
        took.append(stopwatch.seconds())
    return min(took) / _OF_THE_ESTIMATES_S
