"""Private names of CUDA graphs."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import _C

_failed: list[torch.cuda.CUDAGraph] = []  # kept, since the pinned-memory allocator still uses them


def end_failed_capture(graph: torch.cuda.CUDAGraph, pool: Any, device: torch.device) -> None:
    """Cleans up after :meth:`torch.cuda.CUDAGraph.capture_end` has raised.

    The allocator still assigns allocations to the graph's pool: ``_cuda_endAllocateToPool`` and ``_cuda_releasePool``,
    since torch 2.0. Random numbers still count as captured, so that the next one raises until a capture succeeds: an
    empty one is enough. Call this on a stream that may capture. Without the names the pool's memory is lost.

    Args:
        graph: The graph that failed.
        pool: The pool from which it was to allocate.
        device: The GPU.
    """
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        with suppress(AttributeError, RuntimeError):
            getattr(_C, name)(device.index, pool)
    with suppress(RuntimeError):
        graph.reset()
    _failed.append(graph)
    other, number = torch.cuda.CUDAGraph(), torch.zeros((), device=device)
    with suppress(RuntimeError):
        other.capture_begin(capture_error_mode="thread_local")
        number.zero_()
        other.capture_end()
