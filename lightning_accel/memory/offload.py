"""Moves saved tensors to host memory or a file until their backward pass.

A storage is moved once, however many saved tensors are views of it. Copies back start ahead of the backward pass, which
goes through the graph in roughly the reverse order of saving.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import deque
from dataclasses import dataclass, replace
from typing import Literal
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

import torch
from torch import Tensor

from lightning_accel.core.torch_private.tensors import version_of
from lightning_accel.memory.buffers import HostPool, OffloadingError, Pool, Region, SpillFile
from lightning_accel.memory.movers import Flight, Mover, StreamMover, ThreadMover
from lightning_accel.memory.saved_tensors import Packed, counter_of, shares_counter

# How many tensors saved before one are searched for the next ones to prefetch.
_LOOK_BACK = 100
# Addresses that are equal modulo this meet the same alignment requirements of kernels.
_ALIGNMENT = 512

_GONE = (
    "the tensors that this graph saved were offloaded, and are gone: offloading was closed, or failed, after the"
    " forward pass. Run the forward pass again, or the backward pass before undo()."
)


@dataclass(frozen=True)
class Offloading:
    """Where saved tensors are moved to, and which of them."""

    to: Literal["host", "disk"]  # pinned memory of the host (plain memory where the device is a CPU), or a file
    min_bytes: int  # smaller tensors stay
    folder: str | None = None  # where the file is created; None for the folder of temporary files


@dataclass(kw_only=True)
class OffloadStats:
    """What an :class:`Offloader` has done so far."""

    bytes_out: int = 0  # moved off the device
    bytes_in: int = 0  # moved back
    tensors_out: int = 0  # storages, or parts of them, moved off
    live_bytes: int = 0  # held in buffers for living graphs
    total_bytes: int = 0  # taken from the host or the disk by the pool


class Offloader:
    """A saver that moves saved tensors off the device.

    Buffers, the copying thread or stream, and the file are created at first use, are reused in all steps, and last
    until :meth:`close`. A buffer returns to its pool when the last graph that needs it is freed.

    Args:
        device: The device of the tensors that are moved.
        offloading: Where they are moved to.
        prefetch_depth: How many tensors saved just before the one in use are already copied back.
        by_blocks: Whether :meth:`settle` is called before every block. It then waits for the copies of all blocks but
            the latest, so that the memory in use does not depend on the progress of copies.
    """

    def __init__(
        self, device: torch.device, offloading: Offloading, *, prefetch_depth: int = 2, by_blocks: bool = False
    ) -> None:
        self.prefetch_depth = prefetch_depth  # may be set between steps; 0 needs the least memory
        self.complaints: list[str] = []  # why tensors were not moved, each reason once; to be read and cleared
        self._device = device
        self._offloading = offloading
        self._by_blocks = by_blocks
        self._closed = False
        self._done = OffloadStats()
        self._pool: Pool | None = None
        self._mover: Mover | None = None
        self._known: WeakKeyDictionary[torch.UntypedStorage, WeakSet[_Entry]] = WeakKeyDictionary()
        self._live: WeakValueDictionary[int, _Entry] = WeakValueDictionary()  # by their number
        self._packed = 0
        # The garbage collector may delete entries at any time, even while the lock is held: they only leave their
        # buffers here.
        self._left: deque[Region] = deque()
        self._lock = threading.RLock()

    @property
    def stats(self) -> OffloadStats:
        """What it has done so far, and holds now."""
        with self._lock:
            self._collect()
            if self._pool is None:
                return replace(self._done)
            return replace(self._done, live_bytes=self._pool.live_bytes, total_bytes=self._pool.total_bytes)

    def pack(self, tensor: Tensor) -> Packed | None:
        """Starts to move ``tensor``; None if the tensor stays.

        Raises:
            OffloadingError: The disk is full. Everything is released; a later step starts again.
        """
        if self._closed:  # a copy of the model outlives the run
            return None
        nbytes = _extent(tensor) * tensor.element_size()
        is_here = tensor.device.type == self._device.type and self._device.index in (None, tensor.device.index)
        if nbytes < max(self._offloading.min_bytes, 1) or not is_here or tensor.is_conj() or tensor.is_neg():
            return None
        if self._is_recorded():
            self._complain("while a CUDA graph is recorded, whose tensors have fixed places, nothing is moved")
            return None
        with self._lock:
            try:
                entry = self._entry(tensor, nbytes)
            except BaseException:
                self._release()
                raise
        return None if entry is None else _OffloadHandle(entry, tensor)

    @property
    def is_exact(self) -> bool:
        """Whether a block must wait for its copies, so that its memory does not depend on their progress.

        On a CPU the progress is random. On a GPU streams keep the order, but nothing may run ahead without prefetching.
        """
        return self._device.type == "cpu" or self.prefetch_depth == 0

    def settle(self) -> None:
        """Releases tensors whose copies have ended, without waiting, or by blocks. :meth:`pack` does so, too."""
        with self._lock:
            if self._mover is None or self._is_recorded():
                return
            if self._by_blocks:
                self._mover.settle_earlier()
            else:
                self._mover.settle()

    def drain(self) -> None:
        """Waits for the running copies and releases all tensors that were moved."""
        with self._lock:
            if self._mover is not None and not self._is_recorded():
                self._mover.drain()

    def _is_recorded(self) -> bool:
        # A recorded stream may not wait for copies that are outside of the recording.
        return self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def close(self) -> None:
        """Releases buffers, file, thread and stream. Graphs that are still alive lose their offloaded tensors."""
        with self._lock:
            self._closed = True
            self._release()

    # -- out ---------------------------------------------------------------------------------------------------

    def _entry(self, tensor: Tensor, nbytes: int) -> _Entry | None:
        """Returns the entry that holds the current version of this part of the storage, or a new one."""
        storage, version = tensor.untyped_storage(), version_of(tensor)
        known = self._known.setdefault(storage, WeakSet())
        start = int(tensor.storage_offset()) * tensor.element_size()
        end, size = start + nbytes, int(storage.nbytes())
        for entry in known:
            # Parts of one storage may have separate version counters at the same number.
            is_within = entry.start <= start and end <= entry.end
            if is_within and entry.version == version and shares_counter(entry.counter, tensor):
                return entry
        start, end = (0, size) if 2 * nbytes >= size else (start // _ALIGNMENT * _ALIGNMENT, end)
        region = self._move_out(storage, start, end - start)
        if region is None:
            return None
        entry = _Entry(self, self._packed, tensor, version, start, end, region)
        self._live[self._packed] = entry
        self._packed += 1
        known.add(entry)
        return entry

    def _move_out(self, storage: torch.UntypedStorage, start: int, nbytes: int) -> Region | None:
        self._collect()
        on_gpu, to_disk = storage.device.type == "cuda", self._offloading.to == "disk"
        if self._pool is None or self._mover is None:
            self._pool = SpillFile(self._offloading.folder) if to_disk else HostPool(pinned=on_gpu)
            self._mover = (StreamMover if on_gpu and not to_disk else ThreadMover)(storage.device)
        if not self._by_blocks:
            self._mover.settle()
        try:
            region = self._pool.take(nbytes)
        except OffloadingError as error:
            if to_disk:
                raise
            self._complain(f"{error} Until then the tensors stay on the device.")
            return None
        # Enough to keep copies running, if prefetching allows any.
        in_flight = 1 if self.prefetch_depth == 0 else min(max(self.prefetch_depth, 2), 4)
        self._mover.out(_as_bytes(storage)[start : start + nbytes], region, in_flight=in_flight)
        self._done.bytes_out += nbytes
        self._done.tensors_out += 1
        return region

    def _complain(self, reason: str) -> None:
        complaint = f"memory.offload: {reason}"
        if complaint not in self.complaints:
            self.complaints.append(complaint)

    # -- and back ----------------------------------------------------------------------------------------------

    def bytes_of(self, entry: _Entry) -> tuple[Tensor, int]:
        """Returns bytes on the device that contain ``entry``, and where in its storage they start."""
        with self._lock:
            self._collect()
            storage = entry.storage()
            if storage is not None and storage.nbytes() >= entry.end:
                found = _as_bytes(storage), 0  # still being copied, or held by others: already here
            elif entry.region is None or self._mover is None:
                raise OffloadingError(_GONE)
            else:
                try:
                    found = self._mover.land(self._bring_back(entry)), entry.start
                except BaseException:
                    self._release()
                    raise
            if self._mover is not None:
                self._prefetch(entry)
            return found

    def _bring_back(self, entry: _Entry) -> Flight:
        flight = entry.homeward  # read once, since the collector may clear it at any time
        if flight is None:
            assert self._mover is not None
            assert entry.region is not None
            nbytes = entry.end - entry.start
            flight = entry.homeward = self._mover.back(entry.region, nbytes, entry.device)
            self._done.bytes_in += nbytes
        return flight

    def _prefetch(self, entry: _Entry) -> None:
        before = map(self._live.get, range(entry.turn - 1, entry.turn - _LOOK_BACK, -1))
        for earlier in itertools.islice(filter(None, before), self.prefetch_depth):
            if earlier.waiting > 0 and earlier.storage() is None and earlier.region is not None:
                try:
                    self._bring_back(earlier)
                except torch.OutOfMemoryError:
                    return  # no memory ahead of time; there may be when it is needed

    # -- the end -----------------------------------------------------------------------------------------------

    def _collect(self) -> None:
        """Returns the buffers of dead entries to the pool."""
        while self._left:
            region = self._left.popleft()
            if region.pool is self._pool:
                self._pool.give(region)

    def _release(self) -> None:
        for entry in list(self._live.values()):
            entry.region = None
        self._known.clear()  # entries of living graphs are lost and must not be shared with new graphs
        self._left.clear()
        mover, self._mover = self._mover, None
        pool, self._pool = self._pool, None
        if mover is not None:
            mover.close()
        if pool is not None:
            pool.close()


class _Entry:
    """Part of a storage, at one version, moved off the device. Only its handles own it."""

    def __init__(
        self, owner: Offloader, turn: int, tensor: Tensor, version: int, start: int, end: int, region: Region
    ) -> None:
        self.owner = owner
        self.turn = turn
        self.storage = weakref.ref(tensor.untyped_storage())
        self.device = tensor.device
        self.counter, self.version = counter_of(tensor), version
        self.start, self.end = start, end  # in bytes
        self.region: Region | None = region
        self.homeward: Flight | None = None
        self.waiting = 0  # handles that have not been unpacked yet

    def __del__(self) -> None:
        if self.region is not None:
            self.owner._left.append(self.region)


class _OffloadHandle:
    """One saved tensor, as a view of an entry."""

    __slots__ = ("_dtype", "_entry", "_offset", "_sizes", "_waits")

    def __init__(self, entry: _Entry, tensor: Tensor) -> None:
        self._entry = entry
        self._dtype, self._offset, self._sizes = tensor.dtype, tensor.storage_offset(), (tensor.shape, tensor.stride())
        self._waits = True
        entry.waiting += 1

    def unpack(self) -> Tensor:
        found, start = self._entry.owner.bytes_of(self._entry)
        tensor = torch.empty(0, dtype=self._dtype, device=found.device)
        tensor.set_(found.untyped_storage(), self._offset - start // self._dtype.itemsize, *self._sizes)
        self._end_waiting()
        return tensor

    def __del__(self) -> None:
        self._end_waiting()

    def _end_waiting(self) -> None:
        """Drops the copy on the device after the last handle was unpacked."""
        self._entry.waiting -= self._waits
        self._waits = False
        if self._entry.waiting == 0:
            self._entry.homeward = None


def _extent(tensor: Tensor) -> int:
    """Returns the number of elements from the first to the last in memory. It may differ from ``numel()``."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _as_bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
