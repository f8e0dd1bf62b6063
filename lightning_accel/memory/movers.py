"""Copies bytes between a device and the regions of a pool, in parallel to the computation."""

from __future__ import annotations

import ctypes
import functools
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_accel.memory.buffers import Region


@dataclass(eq=False)
class Flight:
    """A running copy, which keeps the memory at both ends alive."""

    bytes: Tensor  # the end on the device: uint8, (n,)
    region: Region  # the other end, of which it uses the first n bytes
    outward: bool  # whether it leaves the device
    stream: torch.cuda.Stream | None = None  # current when the copy was started; None on a CPU
    end: Any = None  # a stream's event, or a thread's future
    is_over: Callable[[], bool] = lambda: False  # does not wait

    def ends(self) -> tuple[Tensor, Tensor]:
        """Returns source and target."""
        stored = self.region.bytes[: self.bytes.numel()]
        return (self.bytes, stored) if self.outward else (stored, self.bytes)


class Mover(ABC):
    """Makes copies one at a time, in the order of requests, while the device computes.

    The computation waits for a copy in :meth:`land`, or if too many copies are running. Nothing waits for the device.
    Call a mover from one thread at a time.
    """

    def __init__(self, device: torch.device) -> None:
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._flights: deque[Flight] = deque()  # in the order in which they start, and end
        self._begun = self._begun_before = 0  # copies, until now and until the latest settle_earlier()

    def out(self, source: Tensor, region: Region, *, in_flight: int) -> None:
        """Starts to copy ``source`` (uint8, ``(n,)``) into ``region``, and keeps it alive until the copy ends.

        At most ``in_flight`` outward copies are then unfinished. Computation started later comes after the older
        copies, so that it can reuse their memory.
        """
        assert source.numel() <= region.size
        self._begin(source, region, outward=True)
        while sum(flight.outward for flight in self._flights) > in_flight:
            self._release()

    def back(self, region: Region, nbytes: int, device: torch.device) -> Flight:
        """Starts to copy the first ``nbytes`` of ``region`` to new memory of the device."""
        assert nbytes <= region.size
        return self._begin(torch.empty(nbytes, dtype=torch.uint8, device=device), region, outward=False)

    def land(self, flight: Flight) -> Tensor:
        """Returns the bytes of a copy back to the device, for use by computation that starts from now on."""
        current = None if flight.stream is None else torch.cuda.current_stream(flight.bytes.device)
        self._wait(flight, current)
        if current is not None and current != flight.stream:
            flight.bytes.record_stream(current)  # the allocator knows only the stream that allocated it
        while flight in self._flights:  # earlier copies, which are before it, are over too
            self._release()
        return flight.bytes

    def settle(self) -> None:
        """Releases what finished copies held, without waiting."""
        while self._flights and self._flights[0].is_over():
            self._release()

    def settle_earlier(self) -> None:
        """Waits for the copies begun before the latest call of this, and releases what they held.

        What is held then depends on the calls alone, and not on the progress of copies.
        """
        while self._flights and self._begun - len(self._flights) < self._begun_before:
            self._release()
        self._begun_before = self._begun

    def drain(self) -> None:
        """Waits for the running copies and releases what they held."""
        while self._flights:
            self._release()

    def close(self) -> None:
        """Waits for the running copies and releases everything."""
        self.drain()

    def _begin(self, on_device: Tensor, region: Region, *, outward: bool) -> Flight:
        flight = Flight(on_device, region, outward)
        self._start(flight)
        self._flights.append(flight)
        self._begun += 1
        return flight

    def _release(self) -> None:
        flight = self._flights.popleft()
        self._wait(flight, flight.stream)

    @abstractmethod
    def _start(self, flight: Flight) -> None: ...

    @abstractmethod
    def _wait(self, flight: Flight, stream: torch.cuda.Stream | None) -> None:
        """Makes ``stream`` (None for the caller) continue only after the copy. Raises what the copy raised."""


class StreamMover(Mover):
    """Copies between a GPU and pinned memory on a separate stream. Only streams wait, for each other.

    Memory returns to the allocator after the computing stream was told to wait for the copy. ``record_stream`` would
    keep it until the host, which runs far ahead, notices the end of the copy.
    """

    @override
    def _start(self, flight: Flight) -> None:
        assert self._side is not None
        device = flight.bytes.device
        flight.stream = torch.cuda.current_stream(device)
        self._side.wait_stream(flight.stream)  # it wrote these bytes, or used this memory before
        source, target = flight.ends()
        with torch.cuda.stream(self._side):
            target.copy_(source, non_blocking=True)
        if flight.stream != torch.cuda.default_stream(device):
            # Another stream may own the memory. Waiting on this stream does not protect that.
            flight.bytes.record_stream(self._side)
        flight.end = self._side.record_event()
        flight.is_over = flight.end.query

    @override
    def _wait(self, flight: Flight, stream: torch.cuda.Stream | None) -> None:
        assert stream is not None
        stream.wait_event(flight.end)


class ThreadMover(Mover):
    """Copies on a separate thread: for CPU memory, and between any device and a file.

    A copy between a GPU and memory that is not pinned blocks its caller, which here is that thread.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        # The thread ends with the mover, even if that is not closed.
        # A thread starts on the first GPU. Leaving a stream context there would create a CUDA context on that GPU.
        begin = None if self._side is None else functools.partial(torch.cuda.set_device, self._side.device)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="lightning-accel-offload", initializer=begin)

    @override
    def _start(self, flight: Flight) -> None:
        ready = None
        if self._side is not None:
            flight.stream = torch.cuda.current_stream(flight.bytes.device)
            ready = flight.stream.record_event()
        # A weak reference, since the caller holds the copy until it is over. So that thread never frees memory, which
        # a profiler of this thread would not see.
        flight.end = self._thread.submit(_copy, weakref.ref(flight), ready, self._side)
        flight.is_over = flight.end.done

    @override
    def _wait(self, flight: Flight, stream: torch.cuda.Stream | None) -> None:
        # The thread finishes only after the copy has ended on the device: no stream has to wait.
        error = flight.end.result()
        if error is not None:
            raise error

    @override
    def close(self) -> None:
        self._thread.shutdown()  # errors of copies are dropped: nobody is left to raise them to
        self._flights.clear()


def _copy(
    reference: weakref.ref[Flight], ready: torch.cuda.Event | None, side: torch.cuda.Stream | None
) -> BaseException | None:
    """Makes the copy. Returns the exception that it raises, or None."""
    flight = reference()
    assert flight is not None
    source, target = flight.ends()
    try:
        if side is None:
            # Not copy_(), which copies on all cores and waits for those that are computing.
            ctypes.memmove(target.data_ptr(), source.data_ptr(), source.numel())
        else:
            assert ready is not None
            with torch.cuda.stream(side):
                side.wait_event(ready)
                target.copy_(source)
                side.synchronize()
        flight.region.pool.let_go(flight.region)
    except BaseException as error:
        return error.with_traceback(None)  # a traceback would keep the flight alive
    return None
