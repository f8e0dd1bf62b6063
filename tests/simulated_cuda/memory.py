"""The caching allocator's books, one for each device, and which kernels use which of its blocks."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

import torch

from simulated_cuda import captures, faults, native
from simulated_cuda.card import CARD
from simulated_cuda.streams import TIMELINE, Clock, Key, current_stream, described

_GRANULE = 512  # bytes: torch rounds every block up
_SEGMENT = 2 * 2**20  # bytes: what it asks the driver for at a time


@dataclass(frozen=True)
class Use:
    """A kernel's, of a block."""

    stream: Key
    tick: int
    operation: str

    def is_before(self, clock: Clock) -> bool:
        """Whether a stream with this clock is sure to come after it."""
        return clock.get(self.stream, 0) >= self.tick


@dataclass(eq=False)
class Block:
    """Memory of one storage.

    Attributes:
        stream: The one that was current when it was allocated: the only one that the allocator waits for.
        last_write: By whom it was written last.
        last_reads: Who has read it since, by stream.
        told: Streams that ``record_stream`` has told the allocator of.
        is_graphs: Whether it lies in the pool of a graph, from which nothing else is allocated.
    """

    address: int
    num_bytes: int
    device: int
    stream: Key
    last_write: Use | None = None
    last_reads: dict[Key, Use] = field(default_factory=dict)
    told: set[Key] = field(default_factory=set)
    is_graphs: bool = False

    def uses(self) -> list[Use]:
        """All that a next writer has to come after."""
        return [*([self.last_write] if self.last_write else []), *self.last_reads.values()]


@dataclass(eq=False)
class Book:
    """One device's memory, in bytes."""

    used: int = 0
    peak: int = 0
    reserved: int = 0
    reserved_peak: int = 0
    num_allocations: int = 0
    num_oom: int = 0
    fraction: float = 1.0
    held_back: list[Block] = field(default_factory=list)  # freed, and waiting for other streams

    def reset_peaks(self) -> None:
        self.peak, self.reserved_peak = self.used, self.reserved

    def give_back(self) -> None:
        """Returns to the driver what is not in use."""
        self.reserved = _segments(self.used)


BOOKS = [Book() for _ in range(native.MOST_DEVICES)]
BLOCKS: dict[int, Block] = {}
"""By address, those of all devices."""


def allocate(values: torch.Tensor, device: int) -> None:
    """Enters the storage of a tensor in a device's book, unless it is there.

    Raises:
        torch.OutOfMemoryError: The card is full.
    """
    storage = values.untyped_storage()
    address, num_bytes = storage.data_ptr(), _rounded(storage.nbytes())
    if not address or address in BLOCKS:
        return
    book = BOOKS[device]
    _collect(book)
    if book.used + num_bytes > CARD.total_bytes * book.fraction:
        book.num_oom += 1
        raise torch.OutOfMemoryError(_full(book, num_bytes, device))
    is_graphs = captures.of_stream(current_stream(device)) is not None
    if book.used + num_bytes > book.reserved and not is_graphs:
        captures.unsafe_call()  # cudaMalloc; a capture's own is permitted, since torch asks for the permission
    book.used += num_bytes
    book.num_allocations += 1
    book.reserved = max(book.reserved, _segments(book.used))
    book.peak, book.reserved_peak = max(book.peak, book.used), max(book.reserved_peak, book.reserved)
    stream = current_stream(device)
    # What the stream was doing with this memory before may not be over.
    allocation = Use(stream, TIMELINE.clock(stream).get(stream, 0), "the allocation")
    block = BLOCKS[address] = Block(address, num_bytes, device, stream, allocation, is_graphs=is_graphs)
    weakref.finalize(storage, _free, block).atexit = False


def _free(block: Block) -> None:
    if BLOCKS.get(block.address) is not block:
        return
    del BLOCKS[block.address]
    clock = TIMELINE.clock(block.stream)
    for use in [] if block.is_graphs else block.uses():
        if not use.is_before(clock) and use.stream not in block.told:
            faults.report(
                f"memory of {described(block.stream)} was freed while {use.operation} on {described(use.stream)} may be"
                " using it: it needs record_stream(), or its own stream has to wait"
            )
    book = BOOKS[block.device]
    if block.told - {block.stream}:
        book.held_back.append(block)
        _collect(book)
    else:
        book.used -= block.num_bytes


def _collect(book: Book) -> None:
    """Takes back blocks that other streams have been using. Not while a capture is under way: no event is asked."""
    if captures.UNDERWAY or not book.held_back:
        return
    waiting, book.held_back = book.held_back, []
    book.used -= sum(block.num_bytes for block in waiting)


def address_of(values: torch.Tensor) -> int:
    """Where a tensor's storage is; 0 where it has none."""
    return values.untyped_storage().data_ptr() if values.layout == torch.strided else 0


def used_by_kernel(operation: str, stream: Key, reads: set[int], writes: set[int], is_engines: bool = False) -> None:
    """Notes which blocks, by address, a kernel on a stream uses, and whether it comes after who it has to.

    Autograd's engine, where it launches a kernel itself, tells the allocator of the gradients that it hands from stream
    to stream.
    """
    tick = TIMELINE.launch(stream)
    clock = TIMELINE.clock(stream)
    this = Use(stream, tick, operation)
    for address in reads | writes:
        block = BLOCKS.get(address)
        if block is None:
            continue
        is_written = address in writes
        if is_engines and stream != block.stream:
            block.told.add(stream)
        earlier = block.uses() if is_written else [block.last_write] if block.last_write else []
        for use in earlier:
            if not use.is_before(clock):
                faults.report(
                    f"{operation} on {described(stream)} {'writes' if is_written else 'reads'} what {use.operation} on"
                    f" {described(use.stream)} may still be using, and waits for nothing"
                )
        if is_written:
            block.last_write, block.last_reads = this, {}
        else:
            block.last_reads[stream] = this


def _rounded(num_bytes: int) -> int:
    return -(-num_bytes // _GRANULE) * _GRANULE


def _segments(num_bytes: int) -> int:
    return -(-num_bytes // _SEGMENT) * _SEGMENT


def _full(book: Book, num_bytes: int, device: int) -> str:
    total = CARD.total_bytes
    return (
        f"CUDA out of memory. Tried to allocate {num_bytes / 2**20:.2f} MiB. GPU {device} has a total capacity of"
        f" {total / 2**30:.2f} GiB of which {(total - book.used) / 2**30:.2f} GiB is free. (simulated)"
    )
