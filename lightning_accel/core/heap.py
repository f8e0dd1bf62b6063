"""The heap of the process: which library keeps it, what it costs in page faults, and when it gives memory back."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

from lightning_accel.core.clocks import Stopwatch

GLIBC, JEMALLOC, TCMALLOC = "glibc", "jemalloc", "tcmalloc"

# mallopt(3). Its numbers, and the values that glibc comes to at most by itself where nobody sets any.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_FIRST_MMAP_THRESHOLD, _LAST_MMAP_THRESHOLD = 128 << 10, 32 << 20

_KEPT_FROM_MMAP = 1 << 30
_NEVER_TRIMMED = -1

_PROBE_RATIO = 1.1
_FAULTS_TIMED = 512

KEPT_ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": str(_KEPT_FROM_MMAP), "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
"""What :meth:`Heap.keep_free_memory` does, for a process that is about to start."""

_DISABLE_ITS_RULE = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_")


def release_free_memory() -> None:
    """Gives free pieces of the heap back, where the C library is glibc; elsewhere nothing.

    A trial frees what it made, but glibc keeps the pieces for later: a run would hold memory that no step of it needs.
    See malloc_trim(3).
    """
    with contextlib.suppress(AttributeError, OSError, TypeError):  # musl, macOS; Windows takes no None
        ctypes.CDLL(None).malloc_trim(0)


def page_faults() -> int:
    """How many pages this process has had to ask the system for since it began, without those read from a disk."""
    import resource  # which Windows does not have

    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


@functools.cache
def page_fault_ms() -> float:
    """What one page costs here that the system has to find and to clear, in milliseconds; measured once a process."""
    size = _FAULTS_TIMED * mmap.PAGESIZE

    def written_ms(region: mmap.mmap) -> float:
        stopwatch = Stopwatch()
        for page in range(0, size, mmap.PAGESIZE):
            region[page] = 1
        return 1e3 * stopwatch.seconds()

    costs = []
    for _ in range(3):  # the least: whatever else the machine does only adds to it
        with mmap.mmap(-1, size) as region:
            costs.append(written_ms(region) - written_ms(region))
    return max(0.0, min(costs)) / _FAULTS_TIMED


def heap_settings(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables by which the user has decided on the heap: those settings are theirs."""
    names = [name for name in (*_DISABLE_ITS_RULE, "MALLOC_ARENA_MAX", "MALLOC_CONF") if environment.get(name)]
    if "malloc" in environment.get("GLIBC_TUNABLES", ""):
        names.append("GLIBC_TUNABLES")
    if environment.get("LD_PRELOAD"):
        names.append("LD_PRELOAD")
    return {name: environment[name] for name in names}


def heap_in_use() -> str:
    """Whose the heap of this process is: ``"glibc"``, ``"jemalloc"``, ``"tcmalloc"``; else the library's file name.

    Empty where that cannot be told.
    """
    if sys.platform != "linux":
        return ""
    process = ctypes.CDLL(None)
    found = _DlInfo()
    try:
        # Not malloc itself: of a program that takes its address (Debian's Python 3.14), that is a stub in the program.
        of_the_heap = ctypes.cast(process.malloc_usable_size, ctypes.c_void_p)
        found_any = process.dladdr(of_the_heap, ctypes.byref(found))
    except AttributeError:
        return ""
    name = Path(os.fsdecode(found.dli_fname)).name if found_any and found.dli_fname else ""
    if name.startswith("libc.so") and hasattr(process, "gnu_get_libc_version"):
        return GLIBC
    return next((one for one in (JEMALLOC, TCMALLOC) if one in name), name)


class _DlInfo(ctypes.Structure):
    """``Dl_info`` of dladdr(3)."""

    _fields_ = (
        ("dli_fname", ctypes.c_char_p),
        ("dli_fbase", ctypes.c_void_p),
        ("dli_sname", ctypes.c_char_p),
        ("dli_saddr", ctypes.c_void_p),
    )


class Heap:
    """glibc's heap, told when to give memory back.

    From a *threshold* on, glibc asks the system for each piece by itself and gives it back when it is freed; and it
    gives back the end of its heap where that is free from twice the threshold on. Every page of it has to be found and
    cleared anew. The threshold begins at 128 KiB and rises to the largest piece that was given back, 32 MiB at most.
    That rule ends for good when a threshold is set by mallopt(3), so what it had come to is set instead of it.

    Raises:
        OSError: The heap of this process is not glibc's.
    """

    _plain_threshold: int | None = None  # of the process: once the rule has ended, nobody can ask for it any more

    def __init__(self) -> None:
        if heap_in_use() != GLIBC:
            raise OSError("the heap of this process is not glibc's")
        self._libc = ctypes.CDLL(None)
        self._libc.malloc.argtypes, self._libc.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
        self._libc.free.argtypes, self._libc.free.restype = [ctypes.c_void_p], None
        self._libc.malloc_usable_size.argtypes = [ctypes.c_void_p]
        self._libc.malloc_usable_size.restype = ctypes.c_size_t

    def keep_free_memory(self) -> None:
        """From now on freed memory stays with the process, for the next step."""
        self._note_plain_threshold()
        self._set(_KEPT_FROM_MMAP, _NEVER_TRIMMED)

    def as_it_was(self) -> None:
        """What glibc's rule had come to before :meth:`keep_free_memory`; what is free goes back to the system."""
        threshold = self._note_plain_threshold()
        self._set(threshold, max(_FIRST_MMAP_THRESHOLD, 2 * threshold))
        release_free_memory()

    def leave(self) -> None:
        """What glibc's rule comes to at most: nobody can tell any more where it would have come to."""
        self._set(_LAST_MMAP_THRESHOLD, 2 * _LAST_MMAP_THRESHOLD)
        Heap._plain_threshold = _LAST_MMAP_THRESHOLD
        release_free_memory()

    def mmap_threshold(self) -> int:
        """From how many bytes on a piece is the system's own, to a tenth.

        The rule sees pieces come and go that are larger by that tenth, and takes them for the program's.
        """
        found: list[int] = []
        # A thread of its own has a part of the heap of its own, with nothing free in it that would be taken first.
        prober = threading.Thread(target=lambda: found.append(self._probed_threshold()))
        prober.start()
        prober.join()
        return found[0]

    def _note_plain_threshold(self) -> int:
        if Heap._plain_threshold is None:
            Heap._plain_threshold = self.mmap_threshold()
        return Heap._plain_threshold

    def _probed_threshold(self) -> int:
        size = _FIRST_MMAP_THRESHOLD
        while size < _LAST_MMAP_THRESHOLD:
            # A piece of the system's has whole pages: nearly one more than was asked for here.
            asked = size // mmap.PAGESIZE * mmap.PAGESIZE + 8
            piece = self._libc.malloc(asked)
            is_own = self._libc.malloc_usable_size(piece) - asked > mmap.PAGESIZE // 2
            self._libc.free(piece)
            if is_own:
                return size
            size = int(size * _PROBE_RATIO)
        return _LAST_MMAP_THRESHOLD

    def _set(self, mmap_threshold: int, trim_threshold: int) -> None:
        if not self._libc.mallopt(_M_MMAP_THRESHOLD, mmap_threshold):  # before glibc 2.35 there was a largest value
            self._libc.mallopt(_M_MMAP_THRESHOLD, _LAST_MMAP_THRESHOLD)
        self._libc.mallopt(_M_TRIM_THRESHOLD, trim_threshold)
