"""Reads the allocator: how many bytes are allocated at marked moments of a step, and the most in between."""

from __future__ import annotations

import gc
import warnings
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

from lightning_accel.core.torch_private.profilers import before_profilers, stop_legacy_profiler
from lightning_accel.core.tree import storages_of

START, END = "start", "end"


class MeterBusyError(RuntimeError):
    """Somebody else is profiling this thread, and only one can."""


@dataclass
class MemoryInterval:
    """From one mark to the next."""

    mark: Hashable  # that it begins with
    level_bytes: int  # allocated at its beginning
    peak_bytes: int  # the most that was allocated at one time within it


class Meter(ABC):
    """Between :meth:`start` and :meth:`stop` the marks divide time into intervals."""

    @abstractmethod
    def start(self, alive: Iterable[Tensor] = ()) -> None:
        """Begins, with the mark ``START``; ``alive`` is taken to be allocated now, where the allocator does not say.

        Raises:
            MeterBusyError: Another profiler is at work (on a CPU).
        """

    @abstractmethod
    def mark(self, mark: Hashable) -> None: ...

    @abstractmethod
    def stop(self) -> list[MemoryInterval]:
        """Ends, and returns the intervals in the order of time.

        Raises:
            MeterBusyError: Another profiler began in the meantime, and this one gave way (on a CPU).
        """

    def abort(self) -> None:  # noqa: B027  # one of them has nothing to end
        """Ends, if need be, without a result."""


def meter_for(device: torch.device) -> Meter:
    """The meter of the allocator that serves ``device``."""
    return _CudaMeter(device) if device.type == "cuda" else _ProfilerMeter()


class _CudaMeter(Meter):
    """The caching allocator's own counters: they follow the order in which the host allocates, with no synchronisation.

    The peak is reset at every mark, so that `torch.cuda.max_memory_allocated()` forgets what was before.
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
        torch.cuda.reset_peak_memory_stats(self._device)

    @override
    def stop(self) -> list[MemoryInterval]:
        if self._intervals:
            self._intervals[-1].peak_bytes = torch.cuda.max_memory_allocated(self._device)
        return self._intervals


@dataclass(frozen=True)
class _Freed:
    """A mark in the midst of an interval: so many bytes are about to be freed, reported or not."""

    size: int


class _ProfilerMeter(Meter):
    """The CPU's allocator counts nothing itself: the profiler reports each of its allocations, and each mark.

    It is autograd's first profiler, not `torch.profiler`: that takes a second to start, writes lines to the terminal,
    and frees its traces in a way that now and then ends the process with a segmentation fault (`~MemoryTraceLogger`
    in Kineto, torch 2.13).

    It does not report that memory is freed which was allocated while nobody profiled: the gradients, which the step
    that is metered drops. Or it does, with the size of what it last saw allocated at the same address and never saw
    freed (`ProfiledCPUMemoryReporter` in c10). So what is alive at the start is watched here, and a report of its end
    is passed over.

    One profiler at a time is all there can be: when the user's begins, this one ends.
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
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecated
            profiler = profiler_legacy.profile(profile_memory=True)  # type: ignore[no-untyped-call]
        storages = storages_of(alive)
        self._base_bytes = sum(storage.nbytes() for storage in storages)
        self._watched = [weakref.ref(storage, self._on_free(storage.nbytes())) for storage in storages]
        del storages
        weak = weakref.ref(self)
        with ExitStack() as stack:
            # What is garbage already must not be freed in the midst of what is metered: before, it does not count.
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
        self._end()  # or nobody could profile after it

    def _end(self) -> list[Any]:
        if not self._is_on:
            return []
        self._is_on = False
        self._around.close()
        return stop_legacy_profiler()

    def _give_way(self) -> None:
        if self._is_on:
            self._end()
            self._gave_way = True

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
        # By threads: this one, which began with our first mark, and where it computes (on a CPU also backward).
        threads = self._end()
        events = next(t for t in threads if any(event.name() == f"{self._PREFIX}0" for event in t))
        self._watched = []
        intervals: list[MemoryInterval] = []
        held = self._base_bytes
        is_counted = False  # a free of which the profiler's own report would come next, if it has one
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
    """All the memory of ``device``; on a CPU that of the machine, or of the container where that is less."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    total = int(psutil.virtual_memory().total)
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdigit() else total
