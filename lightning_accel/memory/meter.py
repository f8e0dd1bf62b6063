"""Reads how many bytes are allocated at marked moments of a step, and the peaks in between."""

from __future__ import annotations

import gc
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor
from torch.autograd import profiler_legacy
from torch.profiler import record_function
from typing_extensions import override

from lightning_accel.core.hidden_warnings import hidden_warnings
from lightning_accel.core.peak_memory import PeakMemory
from lightning_accel.core.torch_private.profilers import before_profilers, stop_legacy_profiler
from lightning_accel.core.tree import storages_of

START, END = "start", "end"


class MeterBusyError(RuntimeError):
    """Another profiler is active on this thread, and only one can be."""


@dataclass
class MemoryInterval:
    """The time from one mark to the next."""

    mark: Hashable  # at its beginning
    level_bytes: int  # allocated at its beginning
    peak_bytes: int  # peak within it


class Meter(ABC):
    """Divides the time from :meth:`start` to :meth:`stop` into intervals, by marks."""

    @abstractmethod
    def start(self, alive: Iterable[Tensor] = ()) -> None:
        """Begins with the mark ``START``. If the allocator cannot tell, ``alive`` tensors count as allocated now.

        Raises:
            MeterBusyError: Another profiler is active (on a CPU).
        """

    @abstractmethod
    def mark(self, mark: Hashable) -> None: ...

    @abstractmethod
    def stop(self) -> list[MemoryInterval]:
        """Ends, and returns the intervals in order.

        Raises:
            MeterBusyError: Another profiler began in the meantime, and this meter gave way (on a CPU).
        """

    def abort(self) -> None:  # noqa: B027  # only one meter has something to end
        """Ends without a result, if it is running."""


def meter_for(device: torch.device) -> Meter:
    """Returns the meter for the allocator of ``device``."""
    return _CudaMeter(device) if device.type == "cuda" else _ProfilerMeter()


class _CudaMeter(Meter):
    """Reads the caching allocator's own counters, which follow the host's allocations without synchronisation.

    Every mark resets the peak, so that `torch.cuda.max_memory_allocated()` forgets earlier values.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._intervals: list[MemoryInterval] = []

    @override
    def start(self, alive: Iterable[Tensor] = ()) -> None:
        self._intervals = []
        self.mark(START)

    @override
    def mark(self, mark: Hashable) -> None:
        self.stop()
        self._intervals.append(MemoryInterval(mark, torch.cuda.memory_allocated(self._device), 0))
        PeakMemory(self._device).reset_counter()  # which leaves other windows their peaks

    @override
    def stop(self) -> list[MemoryInterval]:
        if self._intervals:
            self._intervals[-1].peak_bytes = torch.cuda.max_memory_allocated(self._device)
        return self._intervals


@dataclass(frozen=True)
class _Freed:
    """A mark inside an interval: ``size`` bytes are about to be freed, whether or not the profiler reports it."""

    size: int


class _ProfilerMeter(Meter):
    """Meters the CPU's allocator, which has no counters, by a profiler that reports allocations and marks.

    This is autograd's first profiler, not `torch.profiler`. The latter takes a second to start, writes to the terminal,
    and sometimes crashes the process when it frees its traces (`~MemoryTraceLogger` in Kineto, torch 2.13).

    The profiler does not report the freeing of memory that was allocated before it started, such as gradients that the
    metered step drops. Or it reports the size of the last allocation at that address whose freeing it missed
    (`ProfiledCPUMemoryReporter` in c10). So tensors that are alive at the start are watched here, and reports of their
    freeing are ignored.

    Only one profiler can be active: when the user's begins, this one ends.
    """

    _PREFIX = "lightning_accel.mark."

    def __init__(self) -> None:
        self._is_on = self._gave_way = False
        self._around = ExitStack()
        self._marks: list[Hashable] = []
        self._base_bytes = 0
        self._watched: list[weakref.ref[torch.UntypedStorage]] = []

    @override
    def start(self, alive: Iterable[Tensor] = ()) -> None:
        with hidden_warnings():  # deprecated
            profiler = profiler_legacy.profile(profile_memory=True)  # type: ignore[no-untyped-call]
        storages = storages_of(alive)
        self._base_bytes = sum(storage.nbytes() for storage in storages)
        self._watched = [weakref.ref(storage, self._on_free(storage.nbytes())) for storage in storages]
        del storages
        weak = weakref.ref(self)
        with ExitStack() as stack:
            # Existing garbage must not be freed, and counted, during the metered step.
            if gc.isenabled():
                gc.disable()
                stack.callback(gc.enable)
            try:
                profiler.__enter__()  # type: ignore[no-untyped-call]
            except RuntimeError as error:
                raise MeterBusyError("another profiler is at work") from error
            stack.callback(before_profilers(lambda: None if (meter := weak()) is None else meter._give_way()))
            self._around = stack.pop_all()
        self._marks, self._is_on, self._gave_way = [], True, False
        self.mark(START)

    @override
    def abort(self) -> None:
        self._end()

    def __del__(self) -> None:
        self._end()  # otherwise nobody could profile afterwards

    def _end(self) -> list[Any]:
        if not self._is_on:
            return []
        self._is_on = False
        self._around.close()
        return stop_legacy_profiler()

    def _give_way(self) -> None:
        self._gave_way |= self._is_on
        self._end()

    def _on_free(self, size: int) -> Callable[[Any], None]:
        weak = weakref.ref(self)

        def freed(_: Any) -> None:
            if (meter := weak()) is not None:
                meter.mark(_Freed(size))

        return freed

    @override
    def mark(self, mark: Hashable) -> None:
        if not self._is_on:
            return
        with record_function(f"{self._PREFIX}{len(self._marks)}"):
            self._marks.append(mark)

    @override
    def stop(self) -> list[MemoryInterval]:
        if self._gave_way:
            raise MeterBusyError("another profiler began")
        assert self._is_on
        # Events are grouped by thread. Ours has the first mark, and on a CPU also computes the backward pass.
        threads = self._end()
        events = next(t for t in threads if any(event.name() == f"{self._PREFIX}0" for event in t))
        self._watched = []
        intervals: list[MemoryInterval] = []
        held = self._base_bytes
        is_counted = False  # whether the next event may be the profiler's report of a free already counted
        for event in events:
            kind, name = event.kind(), event.name()
            if kind == "memory_alloc":
                if not (is_counted and event.cpu_memory_usage() < 0):
                    held += event.cpu_memory_usage()
                    if intervals:
                        intervals[-1].peak_bytes = max(intervals[-1].peak_bytes, held)
                is_counted = False
            elif kind == "push":
                mark = self._marks[int(name[len(self._PREFIX) :])] if name.startswith(self._PREFIX) else None
                is_counted = isinstance(mark, _Freed)
                if isinstance(mark, _Freed):
                    held -= mark.size
                elif mark is not None:
                    intervals.append(MemoryInterval(mark, held, held))
        return intervals


def device_memory_bytes(device: torch.device) -> int:
    """Returns the memory of ``device``. On a CPU: of the machine, or of the container if that is less."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    total = int(psutil.virtual_memory().total)
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdigit() else total
