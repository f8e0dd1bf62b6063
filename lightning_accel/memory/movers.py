"""How bytes move between a device and the regions of a pool, beside the computation."""

from __future__ import annotations

import ctypes
import itertools
import queue
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_accel.memory.buffers import Region


@dataclass(eq=False, slots=True)
class Flight:
    """A copy under way, which holds the memory at both its ends.

    Attributes:
        number: Its place among the copies of its mover, which end in the order in which they start.
        bytes: The end on the device: uint8, ``(n,)``.
        region: The other end; its first ``n`` bytes.
        outward: Whether it leaves the device.
        stream: The stream that computed when it was started; None on a CPU.
        over: The event of its end: of a stream, or of a thread.
        error: What a thread's copy raised.
    """

    number: int
    bytes: Tensor
    region: Region
    outward: bool
    stream: torch.cuda.Stream | None
    over: Any
    error: BaseException | None = None

    def ends(self) -> tuple[Tensor, Tensor]:
        """Where it comes from, and where it goes to."""
        stored = self.region.bytes[: self.bytes.numel()]
        return (self.bytes, stored) if self.outward else (stored, self.bytes)


class Mover(ABC):
    """Makes copies in the order in which they are asked for, one at a time, while the device computes.

    What computes waits for a copy by :meth:`land`, or because too many are under way; nothing waits for the device.
    Call it from one thread at a time.

    Attributes:
        waited_s: For how long the caller stood still, in seconds.
    """

    def __init__(self, device: torch.device) -> None:
        self.waited_s = 0.0
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._outward: deque[Flight] = deque()
        self._homeward: deque[Flight] = deque()
        self._numbers = itertools.count()

    def out(self, source: Tensor, region: Region, *, in_flight: int) -> None:
        """Starts to copy ``source`` (uint8, ``(n,)``) into ``region``, and holds it until that has ended.

        Args:
            source: On the device.
            region: Where to.
            in_flight: How many outward copies may be under way afterwards. What computes next comes after those
                before them, so that it may have their memory.
        """
        assert source.numel() <= region.size
        self._outward.append(self._start(source, region, outward=True))
        while len(self._outward) > in_flight:
            self._release(self._outward.popleft())

    def back(self, region: Region, nbytes: int, device: torch.device) -> Flight:
        """Starts to copy the first ``nbytes`` of ``region`` to new memory of the device."""
        assert nbytes <= region.size
        flight = self._start(torch.empty(nbytes, dtype=torch.uint8, device=device), region, outward=False)
        self._homeward.append(flight)
        return flight

    def land(self, flight: Flight) -> Tensor:
        """The bytes that a homeward copy brings, which what computes from here on may use."""
        current = None if flight.stream is None else torch.cuda.current_stream(flight.bytes.device)
        self._wait(flight, current)
        if current is not None and current != flight.stream:
            flight.bytes.record_stream(current)  # the allocator knows only of the stream that asked for it
        for held in (self._outward, self._homeward):
            while held and held[0].number <= flight.number:  # these, too, are over
                self._release(held.popleft())
        return flight.bytes

    def settle(self) -> None:
        """Lets go of what has arrived, without waiting for anything."""
        for held in (self._outward, self._homeward):
            while held and self._is_over(held[0]):
                self._release(held.popleft())

    def drain(self) -> None:
        """Waits for the outward copies under way, and lets go of what they held."""
        while self._outward:
            self._release(self._outward.popleft())

    def close(self) -> None:
        """Sees the copies under way to their end, and lets go of everything."""
        self._finish()
        self._outward.clear()
        self._homeward.clear()

    def _release(self, flight: Flight) -> None:
        self._wait(flight, flight.stream)

    @abstractmethod
    def _start(self, device_bytes: Tensor, region: Region, *, outward: bool) -> Flight: ...

    @abstractmethod
    def _is_over(self, flight: Flight) -> bool: ...

    @abstractmethod
    def _wait(self, flight: Flight, stream: torch.cuda.Stream | None) -> None:
        """Has ``stream`` (None: the caller) go on only after the copy. Raises what the copy raised."""

    @abstractmethod
    def _finish(self) -> None: ...


class StreamMover(Mover):
    """Copies between a GPU and pinned memory on a stream of their own; all waiting is between streams.

    Memory goes back to the allocator once the computing stream has been told to wait for the copy. No
    ``record_stream``, which would keep it until the host, far ahead of the device, happens to see the copy's end.
    """

    @override
    def _start(self, device_bytes: Tensor, region: Region, *, outward: bool) -> Flight:
        assert self._side is not None
        current = torch.cuda.current_stream(device_bytes.device)
        flight = Flight(next(self._numbers), device_bytes, region, outward, current, torch.cuda.Event())  # type: ignore[no-untyped-call]
        source, target = flight.ends()
        self._side.wait_stream(current)  # that wrote these bytes, or used this memory before
        with torch.cuda.stream(self._side):
            target.copy_(source, non_blocking=True)
        if current != torch.cuda.default_stream(device_bytes.device):
            # It may be another stream's memory, which waiting on this one does not protect.
            device_bytes.record_stream(self._side)
        flight.over.record(self._side)
        return flight

    @override
    def _is_over(self, flight: Flight) -> bool:
        return bool(flight.over.query())

    @override
    def _wait(self, flight: Flight, stream: torch.cuda.Stream | None) -> None:
        assert stream is not None
        stream.wait_event(flight.over)

    @override
    def _finish(self) -> None:
        for flight in (*self._outward, *self._homeward):
            self._release(flight)


_Jobs = queue.SimpleQueue[tuple[Flight, "torch.cuda.Event | None"] | None]


class ThreadMover(Mover):
    """Copies on a thread of its own: for memory of a CPU, and between any device and a file.

    A copy between a GPU and memory that is not pinned holds its caller up, which here is that thread.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._jobs: _Jobs = queue.SimpleQueue()
        # The thread knows only the queue, so that it ends with the mover, closed or not.
        self._thread = threading.Thread(
            target=_work, args=(self._jobs, self._side), name="lightning-accel-offload", daemon=True
        )
        self._thread.start()
        weakref.finalize(self, self._jobs.put, None)

    @override
    def _start(self, device_bytes: Tensor, region: Region, *, outward: bool) -> Flight:
        flight = Flight(next(self._numbers), device_bytes, region, outward, None, threading.Event())
        ready = None
        if self._side is not None:
            flight.stream = torch.cuda.current_stream(device_bytes.device)
            ready = flight.stream.record_event()
        self._jobs.put((flight, ready))
        return flight

    @override
    def _is_over(self, flight: Flight) -> bool:
        return bool(flight.over.is_set())

    @override
    def _wait(self, flight: Flight, stream: torch.cuda.Stream | None) -> None:
        # The copy has ended on the device, too, before its thread says so: no stream has anything left to wait for.
        if not flight.over.is_set():
            start = time.perf_counter()
            flight.over.wait()
            self.waited_s += time.perf_counter() - start
        if flight.error is not None:
            raise flight.error

    @override
    def _finish(self) -> None:
        self._jobs.put(None)
        self._thread.join()


def _work(jobs: _Jobs, side: torch.cuda.Stream | None) -> None:
    while (job := jobs.get()) is not None:
        flight = job[0]
        try:
            _copy(*job, side)
        except BaseException as error:
            flight.error = error.with_traceback(None)  # which would hold the flight
        over = flight.over
        # Whoever asked for the copy holds it until it is over. So no memory is ever freed on this thread, where a
        # profiler of the other one would not see it.
        del job, flight
        over.set()


def _copy(flight: Flight, ready: torch.cuda.Event | None, side: torch.cuda.Stream | None) -> None:
    source, target = flight.ends()
    if side is None:
        # Not copy_(), which would have all cores copy, and wait for those that the computation has just then.
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.numel())
    else:
        assert ready is not None
        with torch.cuda.stream(side):
            side.wait_event(ready)
            target.copy_(source)
            side.synchronize()
    flight.region.let_go()
