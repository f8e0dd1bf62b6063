"""Reads the allocator: how many bytes are allocated at marked moments of a step, and the most in between."""

from __future__ import annotations

import gc
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor
from torch._C._autograd import _disable_profiler_legacy, _enable_profiler_legacy, _profiler_enabled
from torch.autograd import profiler_legacy
from torch.profiler import record_function
from typing_extensions import override

from lightning_accel.memory.saved import has_storage

START, END = "start", "end"
_PROFILERS: Any = torch.autograd.profiler  # where all others begin


class MeterBusyError(RuntimeError):
    """Somebody else is profiling this thread, and only one can."""


@dataclass(frozen=True)
class Interval:
    """From one mark to the next.

    Attributes:
        mark: The mark that it begins with.
        level_bytes: Allocated at its beginning.
        peak_bytes: The most that was allocated at one time within it.
    """

    mark: Hashable
    level_bytes: int
    peak_bytes: int


class Meter(ABC):
    """Between :meth:`start` and :meth:`stop` the marks divide time into intervals."""

    @abstractmethod
    def start(self, alive: Iterable[Tensor] = ()) -> None:
        """Begins, with the mark ``START``.

        Args:
            alive: What is taken to be allocated now, where the allocator does not say (on a CPU): parameters,
                buffers, gradients, the optimizer's state.

        Raises:
            MeterBusyError: Another profiler is at work (on a CPU).
        """

    @abstractmethod
    def mark(self, mark: Hashable) -> None: ...

    @abstractmethod
    def stop(self) -> list[Interval]:
        """Ends, and returns the intervals in the order of time.

        Raises:
            MeterBusyError: Another profiler began in the meantime, and this one gave way (on a CPU).
        """

    @abstractmethod
    def abort(self) -> None:
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
        self._intervals: list[Interval] = []
        self._open: tuple[Hashable, int] | None = None

    @override
    def start(self, alive: Iterable[Tensor] = ()) -> None:
        self._intervals = []
        self._begin(START)

    @override
    def mark(self, mark: Hashable) -> None:
        self._end()
        self._begin(mark)

    @override
    def stop(self) -> list[Interval]:
        self._end()
        self._open = None
        return self._intervals

    @override
    def abort(self) -> None:
        self._open = None

    def _begin(self, mark: Hashable) -> None:
        self._open = mark, torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)

    def _end(self) -> None:
        assert self._open is not None
        self._intervals.append(Interval(*self._open, torch.cuda.max_memory_allocated(self._device)))


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
        self._is_on = self._gave_way = self._has_frozen = False
        self._marks: list[Hashable] = []
        self._base_bytes = 0
        self._watched: list[weakref.ref[torch.UntypedStorage]] = []

    @override
    def start(self, alive: Iterable[Tensor] = ()) -> None:
        if _profiler_enabled():
            raise MeterBusyError("another profiler is at work")
        self._marks = []
        storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in filter(has_storage, alive)}
        self._base_bytes = sum(storage.nbytes() for storage in storages.values())
        self._watched = [weakref.ref(storage, self._on_free(storage.nbytes())) for storage in storages.values()]
        del storages
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecated
            config = profiler_legacy.profile(profile_memory=True).config()  # type: ignore[no-untyped-call]
        # What is garbage already must not be freed in the midst of what is metered, and does not count before either.
        self._has_frozen = gc.get_freeze_count() == 0
        if self._has_frozen:
            gc.freeze()
        _enable_profiler_legacy(config)
        self._is_on, self._gave_way = True, False
        self._watch_for_others()
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
        if self._has_frozen:
            gc.unfreeze()
        _PROFILERS._enable_profiler = self._enable_others
        return _disable_profiler_legacy()

    def _watch_for_others(self) -> None:
        meter, enable = weakref.ref(self), _PROFILERS._enable_profiler

        def enable_profiler(*args: Any, **kwargs: Any) -> Any:
            if (found := meter()) is not None and found._is_on:
                found._end()
                found._gave_way = True
            return enable(*args, **kwargs)

        self._enable_others = enable
        _PROFILERS._enable_profiler = enable_profiler

    def _on_free(self, size: int) -> Callable[[Any], None]:
        meter = weakref.ref(self)

        def freed(_: Any) -> None:
            if (found := meter()) is not None and found._is_on:
                found.mark(_Freed(size))

        return freed

    @override
    def mark(self, mark: Hashable) -> None:
        if not self._is_on:
            return
        with record_function(f"{self._PREFIX}{len(self._marks)}"):
            self._marks.append(mark)

    @override
    def stop(self) -> list[Interval]:
        if self._gave_way:
            raise MeterBusyError("another profiler began")
        assert self._is_on
        # By threads: this one, which began with our first mark, and where it computes (on a CPU also backward).
        threads = self._end()
        events = next(t for t in threads if any(event.name() == f"{self._PREFIX}0" for event in t))
        self._watched = []
        intervals: list[Interval] = []
        held = peak = level = self._base_bytes
        mark: Hashable = None
        is_counted = False  # a free of which the profiler's own report would come next, if it has one
        for event in events:
            kind, name = str(event.kind()), event.name()
            if kind == "memory_alloc":
                if not (is_counted and event.cpu_memory_usage() < 0):
                    held += event.cpu_memory_usage()
                    peak = max(peak, held)
                is_counted = False
            elif kind == "push":
                is_counted = False
                if not name.startswith(self._PREFIX):
                    continue
                found = self._marks[int(name[len(self._PREFIX) :])]
                if isinstance(found, _Freed):
                    held -= found.size
                    is_counted = True
                    continue
                if mark is not None:
                    intervals.append(Interval(mark, level, peak))
                mark, level, peak = found, held, held
        if mark is not None:
            intervals.append(Interval(mark, level, peak))
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
