"""Sizes that fill a GPU, and what a processor gets through in the stead of a simulated one."""

from __future__ import annotations

import sys


def on_gpu(size: int, simulated: int) -> int:
    """A size for a real GPU, or the one for a simulated one."""
    return simulated if "simulated_cuda.plugin" in sys.modules else size
