"""Where offloaded bytes lie: pools of host memory, pinned where a GPU copies to it, or of a memory-mapped file."""

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

# A pool grows by a quarter, and by no more than this: in few segments, as pinning memory is slow, and hardly too large.
SEGMENT_BYTES = 1 << 30
# The C library keeps most of what a CPU's tensors free, scattered about its heap: after this many bytes went to a file
# it is told to return that. Without, peak resident memory of a transformer's step hardly fell (12% instead of 40%).
TRIM_BYTES = 64 << 20
# Regions start on pages, so that the pages of one can be let go without its neighbour's.
_PAGE = mmap.ALLOCATIONGRANULARITY
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class OffloadingError(RuntimeError):
    """Offloaded tensors cannot be kept, or are gone. Parameters and optimizer are as they were."""


@dataclass(eq=False, slots=True)
class Region:
    """A stretch of a pool."""

    bytes: Tensor  # the memory: uint8, on the CPU, (size,)
    pool: Pool
    mapping: mmap.mmap | None = None  # that it is part of, if it lies in a file
    offset: int = 0  # where it starts in that

    @property
    def size(self) -> int:
        """In bytes; at least as many as were asked for."""
        return self.bytes.numel()


_SIZE = attrgetter("size")


class Pool(ABC):
    """Memory handed out in regions, kept when they are given back, and returned to the system by :meth:`close`.

    A region may be given back while copies out of it and into it are under way: as all copies of one mover run in
    order, whatever is next copied into it comes after them.
    """

    def __init__(self) -> None:
        self.total_bytes = 0  # that the pool has taken from the system
        self.live_bytes = 0  # that are handed out of it
        self._free: list[Region] = []  # by size
        self._uncut: Region | None = None

    def take(self, nbytes: int) -> Region:
        """A region of at least ``nbytes``.

        Raises:
            OffloadingError: There is no more of this memory.
        """
        size = _rounded(nbytes)
        region = self._reuse(size) or self._carve(size)
        self.live_bytes += region.size
        return region

    def give(self, region: Region) -> None:
        """Takes a region back."""
        assert region.pool is self
        self.live_bytes -= region.size
        insort_left(self._free, region, key=_SIZE)

    def let_go(self, region: Region) -> None:  # noqa: B027  # most pools have nothing to do
        """Takes what lies in a file out of this process's resident memory. The mover calls it after every copy."""

    def close(self) -> None:
        """Forgets all its memory, which is freed with the last region that is still handed out."""
        self._free.clear()
        self._uncut = None
        self.total_bytes = self.live_bytes = 0

    @abstractmethod
    def _segment(self, size: int) -> Region:
        """At least ``size`` bytes from the system. Raises an :class:`OffloadingError` when it has no more."""

    def _reuse(self, size: int) -> Region | None:
        """The smallest free region that is large enough, unless it is larger than twice that."""
        at = bisect_left(self._free, size, key=_SIZE)
        return self._free.pop(at) if at < len(self._free) and self._free[at].size <= 2 * size else None

    def _carve(self, size: int) -> Region:
        """The next ``size`` bytes of the newest segment, or of a newer one."""
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
    """Memory of the host, ``pinned`` for copies that a GPU makes by itself while it and the CPU go on."""

    def __init__(self, *, pinned: bool) -> None:
        super().__init__()
        self._pinned = pinned
        self._failure = ""  # why the system had no more

    @override
    def _segment(self, size: int) -> Region:
        if not self._failure:  # else it is not asked again at every tensor: it takes the system long to say no
            # Torch rounds what it pins up to a power of two, and leaves the rest unused.
            rounded = 1 << (size - 1).bit_length() if self._pinned else size
            try:
                return Region(torch.empty(rounded, dtype=torch.uint8, pin_memory=self._pinned), self)
            except RuntimeError as error:
                self._failure = str(error).partition("\n")[0]
        kind = "pinned host memory" if self._pinned else "host memory"
        raise OffloadingError(
            f"no {format_bytes(size)} more of {kind} beyond the {format_bytes(self.total_bytes)} in use"
            f" ({self._failure}). Raise min_bytes, free memory of the host, or use memory.offload='disk'."
        )


class SpillFile(Pool):
    """A file without a name, gone with the process however that ends, and mapped into memory.

    Space is reserved before anything is mapped: writing to a mapping on a full disk would end the process. A folder
    that lies in memory (a tmpfs, as that for temporary files is on some systems) saves none.
    """

    def __init__(self, folder: str | None = None) -> None:
        super().__init__()
        self._folder = folder or tempfile.gettempdir()
        try:
            # On Windows it has a name, and is deleted when it is closed.
            self._file: IO[bytes] = tempfile.TemporaryFile(prefix="lightning-accel-", dir=folder)  # noqa: SIM115
        except OSError as error:
            raise OffloadingError(
                f"memory.offload='disk': no file can be made in {self._folder} ({error.strerror})."
                " Name a folder that exists and can be written to: {'to': 'disk', 'folder': '/scratch'}."
            ) from error
        weakref.finalize(self, self._file.close)  # for those who forget to
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
        # macOS and Windows: grown without being reserved, so that another program may yet fill the disk.
        if shutil.disk_usage(self._folder).free < size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.ftruncate(self._file.fileno(), self.total_bytes + size)


def _rounded(nbytes: int) -> int:
    """Whole pages, in steps of an eighth: sizes that change a little from step to step share regions."""
    step = max(_PAGE, 1 << max(0, nbytes.bit_length() - 4))
    return -(-nbytes // step) * step
