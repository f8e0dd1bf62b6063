"""Peak memory in measuring windows that do not disturb each other."""

from __future__ import annotations

import functools
import os
import re
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import torch

from lightning_accel.core.device import with_index


class PeakMemory:
    """The peak since the latest :meth:`restart`: of torch's allocator on CUDA, otherwise of this process.

    There is one counter, and beginning a window resets it. Its value is first saved for all other windows.

    Attributes:
        source: Which counter is read, and since when, in words.
        can_restart: Whether a window can begin. Otherwise the peak is that of the whole process.
    """

    def __init__(self, device: torch.device) -> None:
        device = with_index(device)
        self.source, self._read, self._reset = _counter_of(device)
        self.can_restart = self._reset is not None
        # Other devices have no counter: windows share that of this process.
        self._others = _WINDOWS.setdefault(device if device.type == "cuda" else None, weakref.WeakSet())
        self._others.add(self)
        self._before = 0

    def restart(self) -> None:
        """Begins a new window if the system can."""
        self.reset_counter()
        self._before = 0

    def reset_counter(self) -> None:
        """Resets the counter if the system can. All windows keep their peaks, this one as well."""
        if self._reset is None:
            return
        peak = self._read()
        for window in self._others:
            window._before = max(window._before, peak)
        self._reset()

    def peak_bytes(self) -> int:
        return max(self._before, self._read())


_CLEAR_REFS = "/proc/self/clear_refs"  # man 5 proc
_WINDOWS: dict[torch.device | None, weakref.WeakSet[PeakMemory]] = {}


def _counter_of(device: torch.device) -> tuple[str, Callable[[], int], Callable[[], object] | None]:
    """Returns what counts the peak, in words, and the functions that read and reset it, the latter if it can be."""
    if device.type == "cuda":
        return (
            "device allocator's peak, reset per epoch",
            lambda: torch.cuda.max_memory_allocated(device),
            lambda: torch.cuda.reset_peak_memory_stats(device),
        )
    if may_reset_peak():
        return "process high-water mark, reset per epoch", _peak_since_reset, _reset_peak
    return "process high-water mark since its start", _peak_since_start, None


@functools.cache
def may_reset_peak() -> bool:
    """Returns whether this process may reset its own peak, as Linux allows. To ask does not reset it."""
    return os.access(_CLEAR_REFS, os.W_OK) and _peak_since_reset() > 0


def _reset_peak() -> None:
    with suppress(OSError):  # no file can be opened any more: the window contains what was before it
        Path(_CLEAR_REFS).write_text("5", encoding="ascii")


def _peak_since_reset() -> int:
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:  # no file can be opened any more
        return _peak_since_start()
    mark = re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)
    return int(mark[1]) * 1024 if mark is not None else 0


def _peak_since_start() -> int:
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource

    max_rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return max_rss if sys.platform == "darwin" else max_rss * 1024
