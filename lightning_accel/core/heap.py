"""The heap of the process: which library manages it, what page faults cost, and when it returns memory."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lightning_accel.core.clocks import Stopwatch

GLIBC, JEMALLOC, TCMALLOC = "glibc", "jemalloc", "tcmalloc"

# Parameters of mallopt(3), and the first and the largest threshold of glibc's own adaptation.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_FIRST_MMAP_THRESHOLD, _LAST_MMAP_THRESHOLD = 128 << 10, 32 << 20

_KEPT_FROM_MMAP = 1 << 30
_NEVER_TRIMMED = -1

_PROBE_RATIO = 1.1
_FAULTS_TIMED = 512

KEPT_ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": str(_KEPT_FROM_MMAP), "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
"""The effect of :meth:`Heap.keep_free_memory`, for a process that is about to start."""

_DISABLE_ITS_RULE = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_")


def release_free_memory() -> None:
    """Returns free heap memory to the system if the C library is glibc; otherwise does nothing.

    glibc keeps what a trial frees for later use, so the run would hold memory that none of its steps needs. See
    malloc_trim(3).
    """
    with contextlib.suppress(AttributeError, OSError, TypeError):  # musl, macOS; Windows takes no None
        ctypes.CDLL(None).malloc_trim(0)


def page_faults() -> int:
    """Returns how many page faults without disk access (minor faults) this process has had."""
    import resource  # not on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


@functools.cache
def page_fault_ms() -> float:
    """Returns the milliseconds of one page fault, in which the system finds and clears a page; measured once."""
    size = _FAULTS_TIMED * mmap.PAGESIZE

    def written_ms(region: mmap.mmap) -> float:
        stopwatch = Stopwatch()
        for page in range(0, size, mmap.PAGESIZE):
            region[page] = 1
        return 1e3 * stopwatch.seconds()

    costs = []
    for _ in range(3):  # the minimum is kept: other work of the machine only adds time
        with mmap.mmap(-1, size) as region:
            costs.append(written_ms(region) - written_ms(region))
    return max(0.0, min(costs)) / _FAULTS_TIMED


def heap_settings(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns the environment variables with which the user has configured the heap."""
    names = (*_DISABLE_ITS_RULE, "MALLOC_ARENA_MAX", "MALLOC_CONF", "GLIBC_TUNABLES", "LD_PRELOAD")
    given = {name: environment[name] for name in names if environment.get(name)}
    return {name: value for name, value in given.items() if name != "GLIBC_TUNABLES" or "malloc" in value}


def heap_in_use() -> str:
    """Returns what manages this process's heap: ``"glibc"``, ``"jemalloc"``, ``"tcmalloc"``, or a library's file name.

    Empty if it cannot be determined.
    """
    if sys.platform != "linux":
        return ""
    process = ctypes.CDLL(None)
    found = (ctypes.c_char_p * 4)()  # Dl_info of dladdr(3), which begins with the library's file name
    try:
        # Not malloc: if a program takes its address (Debian's Python 3.14), dladdr() finds a stub in the program.
        of_the_heap = ctypes.cast(process.malloc_usable_size, ctypes.c_void_p)
        found_any = process.dladdr(of_the_heap, ctypes.byref(found))
    except AttributeError:
        return ""
    name = Path(os.fsdecode(found[0])).name if found_any and found[0] else ""
    if name.startswith("libc.so") and hasattr(process, "gnu_get_libc_version"):
        return GLIBC
    return next((one for one in (JEMALLOC, TCMALLOC) if one in name), name)


class Heap:
    """glibc's heap, with control over when it returns memory to the system.

    glibc requests each piece above a *threshold* directly from the system and returns it when it is freed. It also
    returns the end of its heap when twice the threshold is free there. Every page must then be found and cleared again.
    The threshold starts at 128 KiB and rises to the largest piece freed so far, at most to 32 MiB. Setting a threshold
    by mallopt(3) ends this adaptation for good. To undo it, the value reached before is set.

    Raises:
        OSError: The heap of this process is not glibc's.
    """

    _plain_threshold: int | None = None  # per process: cannot be measured once the adaptation has ended

    def __init__(self) -> None:
        if heap_in_use() != GLIBC:
            raise OSError("the heap of this process is not glibc's")
        self._libc = ctypes.CDLL(None)
        self._libc.malloc.argtypes, self._libc.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
        self._libc.free.argtypes, self._libc.free.restype = [ctypes.c_void_p], None
        self._libc.malloc_usable_size.argtypes = [ctypes.c_void_p]
        self._libc.malloc_usable_size.restype = ctypes.c_size_t

    def keep_free_memory(self) -> None:
        """Keeps freed memory in the process, for the next step."""
        self._threshold_before()
        self._set(_KEPT_FROM_MMAP, _NEVER_TRIMMED)

    def as_it_was(self) -> None:
        """Restores the threshold from before :meth:`keep_free_memory` and returns free memory to the system."""
        threshold = self._threshold_before()
        self._set(threshold, max(_FIRST_MMAP_THRESHOLD, 2 * threshold))
        release_free_memory()

    def leave(self) -> None:
        """Sets the largest threshold that glibc adapts to, since the one it would have reached is unknown."""
        self._set(_LAST_MMAP_THRESHOLD, 2 * _LAST_MMAP_THRESHOLD)
        Heap._plain_threshold = _LAST_MMAP_THRESHOLD
        release_free_memory()

    def _threshold_before(self) -> int:
        """Measures once from how many bytes on glibc requests a piece directly from the system, to within 10 %.

        The measurement frees pieces up to 10 % larger than the threshold, so it may raise the threshold by as much.
        """
        if Heap._plain_threshold is None:
            # A new thread has its own part of the heap, without free pieces that malloc would use first.
            with ThreadPoolExecutor(1) as prober:
                Heap._plain_threshold = prober.submit(self._probed_threshold).result()
        return Heap._plain_threshold

    def _probed_threshold(self) -> int:
        size = _FIRST_MMAP_THRESHOLD
        while size < _LAST_MMAP_THRESHOLD:
            # A piece from the system is rounded up to whole pages: here by nearly one page.
            asked = size // mmap.PAGESIZE * mmap.PAGESIZE + 8
            piece = self._libc.malloc(asked)
            is_own = self._libc.malloc_usable_size(piece) - asked > mmap.PAGESIZE // 2
            self._libc.free(piece)
            if is_own:
                return size
            size = int(size * _PROBE_RATIO)
        return _LAST_MMAP_THRESHOLD

    def _set(self, mmap_threshold: int, trim_threshold: int) -> None:
        if not self._libc.mallopt(_M_MMAP_THRESHOLD, mmap_threshold):  # glibc before 2.35 has a maximum
            self._libc.mallopt(_M_MMAP_THRESHOLD, _LAST_MMAP_THRESHOLD)
        self._libc.mallopt(_M_TRIM_THRESHOLD, trim_threshold)
