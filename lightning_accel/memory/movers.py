"""How bytes move between a device and the regions of a pool, beside the computation."""

from __future__ import annotations

import ctypes
import functools
import itertools
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
    """A copy under way, which holds the memory at both its ends."""

    number: int  # its place among the copies of its mover, which end in the order in which they start
    bytes: Tensor  # the end on the device: uint8, (n,)
    region: Region  # the other end; its first n bytes
    outward: bool  # whether it leaves the device
    stream: torch.cuda.Stream | None = None  # that computed when it was started; None on a CPU
    end: Any = None  # a stream's event, or a thread's future
    is_over: Callable[[], bool] = lambda: False  # asked without waiting

    def ends(self) -> tuple[Tensor, Tensor]:
        """Where it comes from, and where it goes to."""
        stored = self.region.bytes[: self.bytes.numel()]
        return (self.bytes, stored) if self.outward else (stored, self.bytes)


class Mover(ABC):
    """Makes copies in the order in which they are asked for, one at a time, while the device computes.

    What computes waits for a copy by :meth:`land`, or because too many are under way; nothing waits for the device.
    Call it from one thread at a time.
    """

    def __init__(self, device: torch.device) -> None:
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._flights: deque[Flight] = deque()  # in the order in which they start, and end
        self._numbers = itertools.count()

    def out(self, source: Tensor, region: Region, *, in_flight: int) -> None:
        """Starts to copy ``source`` (uint8, ``(n,)``) into ``region``, and holds it until that has ended.

        Up to ``in_flight`` outward copies are under way afterwards. What computes next comes after those before them,
        so that it may have their memory.
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
        """The bytes that a homeward copy brings, which what computes from here on may use."""
        current = None if flight.stream is None else torch.cuda.current_stream(flight.bytes.device)
        self._wait(flight, current)
        if current is not None and current != flight.stream:
            flight.bytes.record_stream(current)  # the allocator knows only of the stream that asked for it
        while self._flights and self._flights[0].number <= flight.number:  # those before it are over, too
            self._release()
        return flight.bytes

    def settle(self) -> None:
        """Lets go of what has arrived, without waiting for anything."""
        while self._flights and self._flights[0].is_over():
            self._release()

    def drain(self) -> None:
        """Waits for the copies under way, and lets go of what they held."""
        while self._flights:
            self._release()

    def close(self) -> None:
        """Sees the copies under way to their end, and lets go of everything."""
        self.drain()

    def _begin(self, on_device: Tensor, region: Region, *, outward: bool) -> Flight:
        flight = Flight(next(self._numbers), on_device, region, outward)
        self._start(flight)
        self._flights.append(flight)
        return flight

    def _release(self) -> None:
        flight = self._flights.popleft()
        self._wait(flight, flight.stream)

    @abstractmethod
    def _start(self, flight: Flight) -> None: ...

    @abstractmethod
    def _wait(self, flight: Flight, stream: torch.cuda.Stream | None) -> None:
        """Has ``stream`` (None: the caller) go on only after the copy. Raises what the copy raised."""


class StreamMover(Mover):
    """Copies between a GPU and pinned memory on a stream of their own; all waiting is between streams.

    Memory goes back to the allocator once the computing stream has been told to wait for the copy. No
    ``record_stream``, which would keep it until the host, far ahead of the device, happens to see the copy's end.
    """

    @override
    def _start(self, flight: Flight) -> None:
        assert self._side is not None
        device = flight.bytes.device
        flight.stream = torch.cuda.current_stream(device)
        self._side.wait_stream(flight.stream)  # that wrote these bytes, or used this memory before
        source, target = flight.ends()
        with torch.cuda.stream(self._side):
            target.copy_(source, non_blocking=True)
        if flight.stream != torch.cuda.default_stream(device):
            # It may be another stream's memory, which waiting on this one does not protect.
            flight.bytes.record_stream(self._side)
        flight.end = self._side.record_event()
        flight.is_over = flight.end.query

    @override
    def _wait(self, flight: Flight, stream: torch.cuda.Stream | None) -> None:
        assert stream is not None
        stream.wait_event(flight.end)


class ThreadMover(Mover):
    """Copies on a thread of its own: for memory of a CPU, and between any device and a file.

    A copy between a GPU and memory that is not pinned holds its caller up, which here is that thread.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        # Its thread ends with it, closed or not.
        # A thread begins on the first GPU: to leave a stream there would make a context on it.
        begin = None if self._side is None else functools.partial(torch.cuda.set_device, self._side.device)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="lightning-accel-offload", initializer=begin)

    @override
    def _start(self, flight: Flight) -> None:
        ready = None
        if self._side is not None:
            flight.stream = torch.cuda.current_stream(flight.bytes.device)
            ready = flight.stream.record_event()
        # Weakly: whoever asked for the copy holds it until it is over. So no memory is ever freed on that thread, where
        # a profiler of this one would not see it.
        flight.end = self._thread.submit(_copy, weakref.ref(flight), ready, self._side)
        flight.is_over = flight.end.done

    @override
    def _wait(self, flight: Flight, stream: torch.cuda.Stream | None) -> None:
        # The copy has ended on the device, too, before its thread says so: no stream has anything left to wait for.
        error = flight.end.result()
        if error is not None:
            raise error

    @override
    def close(self) -> None:
        self._thread.shutdown()  # with nobody there to raise what a copy raised
        self._flights.clear()


def _copy(
    reference: weakref.ref[Flight], ready: torch.cuda.Event | None, side: torch.cuda.Stream | None
) -> BaseException | None:
    """Makes the copy, and returns what it raises."""
    flight = reference()
    assert flight is not None
    source, target = flight.ends()
    try:
        if side is None:
            # Not copy_(), which would have all cores copy, and wait for those that the computation has just then.
            ctypes.memmove(target.data_ptr(), source.data_ptr(), source.numel())
        else:
            assert ready is not None
            with torch.cuda.stream(side):
                side.wait_event(ready)
                target.copy_(source)
                side.synchronize()
        flight.region.pool.let_go(flight.region)
    except BaseException as error:
        return error.with_traceback(None)  # which would hold the flight
    return None
