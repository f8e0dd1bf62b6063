"""Storage for offloaded bytes: pools of host memory, pinned for copies by a GPU, or of a memory-mapped file."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import tempfile
import weakref
from abc import ABC, abstractmethod
from bisect import bisect_left, insort_left
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from typing import IO

import torch
from torch import Tensor
from typing_extensions import override

from lightning_accel.core.byte_size import format_bytes
from lightning_accel.core.heap import release_free_memory

# A pool grows by a quarter, at most by this: in few segments, since pinning is slow, and with little excess.
SEGMENT_BYTES = 1 << 30
# The C library keeps most memory that CPU tensors free, scattered over its heap. It is told to return that memory each
# time this many bytes went to a file. Otherwise a transformer step's peak resident memory fell by 12% instead of 40%.
TRIM_BYTES = 64 << 20
# Regions start at page boundaries, so that one can be dropped from memory without its neighbour.
_PAGE = mmap.ALLOCATIONGRANULARITY
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class OffloadingError(RuntimeError):
    """Offloaded tensors cannot be stored, or are lost. Parameters and optimizer are unchanged."""


@dataclass(eq=False, slots=True)
class Region:
    """A contiguous part of a pool."""

    bytes: Tensor  # the memory: uint8, on the CPU, (size,)
    pool: Pool
    mapping: mmap.mmap | None = None  # the mapping it is part of, if it lies in a file
    offset: int = 0  # its start in the mapping

    @property
    def size(self) -> int:
        """The size in bytes, at least the requested one."""
        return self.bytes.numel()


_SIZE = attrgetter("size")


class Pool(ABC):
    """Memory that is handed out in regions, reused after their return, and released to the system by :meth:`close`.

    A region may be returned while copies from it and to it are running. All copies of one mover run in order, so the
    next copy into the region comes after them.
    """

    def __init__(self) -> None:
        self.total_bytes = 0  # taken from the system
        self.live_bytes = 0  # handed out
        self._free: list[Region] = []  # by size
        self._uncut: Region | None = None

    def take(self, nbytes: int) -> Region:
        """Returns a region of at least ``nbytes``.

        Raises:
            OffloadingError: This kind of memory is exhausted.
        """
        size = _rounded(nbytes)
        region = self._reuse(size) or self._carve(size)
        self.live_bytes += region.size
        return region

    def give(self, region: Region) -> None:
        assert region.pool is self
        self.live_bytes -= region.size
        insort_left(self._free, region, key=_SIZE)

    def let_go(self, region: Region) -> None:  # noqa: B027  # most pools have nothing to do
        """Removes a region in a file from this process's resident memory. The mover calls this after every copy."""

    def close(self) -> None:
        """Releases all memory. Regions that are still handed out keep theirs until they are freed."""
        self._free.clear()
        self._uncut = None
        self.total_bytes = self.live_bytes = 0

    @abstractmethod
    def _segment(self, size: int) -> Region:
        """Returns at least ``size`` bytes from the system. Raises an :class:`OffloadingError` if it has no more."""

    def _reuse(self, size: int) -> Region | None:
        """Returns the smallest free region that is large enough, if it is at most twice as large; otherwise None."""
        at = bisect_left(self._free, size, key=_SIZE)
        return self._free.pop(at) if at < len(self._free) and self._free[at].size <= 2 * size else None

    def _carve(self, size: int) -> Region:
        """Returns the next ``size`` bytes of the newest segment, or of a new one."""
        if self._uncut is None or self._uncut.size < size:
            wanted = max(size, min(self.total_bytes // 4, SEGMENT_BYTES))
            try:
                segment = self._segment(wanted)
            except OffloadingError:
                if wanted == size:
                    raise
                segment = self._segment(size)
            self.total_bytes += segment.size
            if self._uncut is not None:
                insort_left(self._free, self._uncut, key=_SIZE)
            self._uncut = segment
        whole, self._uncut = self._uncut, None
        if whole.size > size:
            self._uncut = Region(whole.bytes[size:], self, whole.mapping, whole.offset + size)
        return Region(whole.bytes[:size], self, whole.mapping, whole.offset)


class HostPool(Pool):
    """Host memory, ``pinned`` for copies that a GPU makes itself while it and the CPU go on."""

    def __init__(self, *, pinned: bool) -> None:
        super().__init__()
        self._pinned = pinned
        self._failure = ""  # why the system refused

    @override
    def _segment(self, size: int) -> Region:
        if not self._failure:  # do not ask again at every tensor: a refusal is slow
            # Torch rounds pinned memory up to a power of two and leaves the rest unused.
            rounded = 1 << (size - 1).bit_length() if self._pinned else size
            try:
                memory = torch.empty(rounded, dtype=torch.uint8, device="cpu", pin_memory=self._pinned)
                return Region(memory, self)
            except RuntimeError as error:
                self._failure = str(error).partition("\n")[0]
        kind = "pinned host memory" if self._pinned else "host memory"
        raise OffloadingError(
            f"no {format_bytes(size)} more of {kind} beyond the {format_bytes(self.total_bytes)} in use"
            f" ({self._failure}). Raise min_bytes, free memory of the host, or use memory.offload='disk'."
        )


class SpillFile(Pool):
    """A nameless file, mapped into memory. It disappears when the process ends, in whatever way.

    Space is reserved before mapping, since writing to a mapping on a full disk would crash the process. A folder in
    memory (a tmpfs, which some systems use for temporary files) saves no memory.
    """

    def __init__(self, folder: str | None = None) -> None:
        super().__init__()
        self._folder = folder or tempfile.gettempdir()
        try:
            # On Windows the file has a name and is deleted when it is closed.
            self._file: IO[bytes] = tempfile.TemporaryFile(prefix="lightning-accel-", dir=folder)  # noqa: SIM115
        except OSError as error:
            raise OffloadingError(
                f"memory.offload='disk': no file can be made in {self._folder} ({error.strerror})."
                " Name a folder that exists and can be written to: {'to': 'disk', 'folder': '/scratch'}."
            ) from error
        weakref.finalize(self, self._file.close)  # if nobody calls close()
        self._untrimmed_bytes = 0

    @override
    def let_go(self, region: Region) -> None:
        if region.mapping is not None and hasattr(mmap, "MADV_DONTNEED"):
            region.mapping.madvise(mmap.MADV_DONTNEED, region.offset, region.size)
        self._untrimmed_bytes += region.size
        if self._untrimmed_bytes >= TRIM_BYTES:
            self._untrimmed_bytes = 0
            release_free_memory()

    @override
    def close(self) -> None:
        super().close()
        self._file.close()

    @override
    def _segment(self, size: int) -> Region:
        size = -(-size // _PAGE) * _PAGE
        try:
            self._reserve(size)
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            free = "how much is free cannot be seen"
            with suppress(OSError):
                free = f"{format_bytes(shutil.disk_usage(self._folder).free)} free"
            raise OffloadingError(
                f"memory.offload='disk' needs {format_bytes(size)} more in {self._folder!r}, beyond the"
                f" {format_bytes(self.total_bytes)} there: {os.strerror(error.errno)} ({free}). This"
                " step is lost, parameters and optimizer are as before it, and the file is removed. Free some space,"
                " name another folder (memory.offload={'to': 'disk', 'folder': ...}), raise min_bytes, or use"
                " memory.offload='host'."
            ) from error
        mapping = mmap.mmap(self._file.fileno(), size, offset=self.total_bytes)
        return Region(torch.frombuffer(mapping, dtype=torch.uint8), self, mapping)

    def _reserve(self, size: int) -> None:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self._file.fileno(), self.total_bytes, size)
            return
        # macOS and Windows cannot reserve space: another program may still fill the disk.
        if shutil.disk_usage(self._folder).free < size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.ftruncate(self._file.fileno(), self.total_bytes + size)


def _rounded(nbytes: int) -> int:
    """Rounds up to pages, in steps of an eighth: sizes that vary a little between steps then share regions."""
    step = max(_PAGE, 1 << max(0, nbytes.bit_length() - 4))
    return -(-nbytes // step) * step
