"""Private names of profilers and of the CUDA allocator's history."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import _C

from lightning_accel.core.patch import AttributePatch


def stop_legacy_profiler() -> list[list[Any]]:
    """Stops autograd's first profiler and returns its events by thread: ``_disable_profiler_legacy``, torch 1.9.

    The public way sorts events and loses the order of allocations. Without the name no memory budget can be planned on
    a CPU.
    """
    return _C._autograd._disable_profiler_legacy()


def before_profilers(tell: Callable[[], Any]) -> Callable[[], None]:
    """Has ``tell`` called before any profiler starts. Returns a function that ends this.

    All profilers start with ``torch.autograd.profiler._enable_profiler``, since torch 1.9. Only one profiler can run:
    ours must end before another one starts, or that one raises.
    """
    profilers: Any = torch.autograd.profiler
    enable = profilers._enable_profiler

    def enable_profiler(*args: Any, **kwargs: Any) -> Any:
        tell()
        return enable(*args, **kwargs)

    patch = AttributePatch("", "tells of it", profilers, "_enable_profiler", enable_profiler)
    patch.apply()
    return patch.undo


def record_memory_history(*, is_on: bool) -> None:
    """Makes the CUDA allocator record its actions with their source lines: ``_record_memory_history``, since torch 2.1.

    Documented: https://docs.pytorch.org/docs/stable/torch_cuda_memory.html
    Without the name: an AttributeError, so that no step is traced on such a device. The run goes on.
    """
    if is_on:
        torch.cuda.memory._record_memory_history(max_entries=100_000)  # a few hundred MiB at most
    else:
        torch.cuda.memory._record_memory_history(enabled=None)


def memory_snapshot() -> dict[str, Any]:
    """Returns the CUDA allocator's state and history for https://pytorch.org/memory_viz: ``_snapshot``, torch 2.1.

    Documented: https://docs.pytorch.org/docs/stable/torch_cuda_memory.html. Without the name: as for
    :func:`record_memory_history`.
    """
    snapshot: dict[str, Any] = torch.cuda.memory._snapshot()
    return snapshot
