"""How fast this machine runs Python: estimates of what setting up takes are made for one machine, and scaled by it."""

from __future__ import annotations

import ast
import functools
from contextlib import nullcontext

import torch

from lightning_accel.experiment.time_calls import time_calls

_TEXT = "x = [f(a, *b, c=d) for a, b in e if a < 1]\n" * 5
_OF_THE_ESTIMATES_S = 2.5e-4  # an Intel Xeon (Emerald Rapids) of 2026, Python 3.11


@functools.cache
def python_pace() -> float:
    """Returns how many times as long Python takes here as where the estimates were made. Takes a millisecond, once."""
    took = time_calls({"": lambda: nullcontext(_work)}, torch.device("cpu"), rounds=3)[""]
    return min(took) / _OF_THE_ESTIMATES_S


def _work() -> None:
    ast.unparse(ast.parse(_TEXT))  # by classes of Python, many small calls: like TorchDynamo
