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
from dataclasses import dataclass, field

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
    """

    number: int
    bytes: Tensor
    region: Region
    outward: bool
    stream: torch.cuda.Stream | None


class Mover(ABC):
    """Makes copies in the order in which they are asked for, one at a time, while the device computes.

    What computes waits for a copy by :meth:`land`, or because too many are under way; nothing waits for the device.
    Call it from one thread at a time.

    Attributes:
        waited_s: For how long the caller stood still, in seconds.
    """

    def __init__(self) -> None:
        self.waited_s = 0.0
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
        if flight.stream is None:
            self._wait(flight, None)
        else:
            current = torch.cuda.current_stream(flight.bytes.device)
            self._wait(flight, current)
            if current != flight.stream:
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


@dataclass(eq=False, slots=True)
class _StreamFlight(Flight):
    over: torch.cuda.Event = field(kw_only=True)


class StreamMover(Mover):
    """Copies between a GPU and pinned memory on a stream of their own; all waiting is between streams.

    Memory goes back to the allocator once the computing stream has been told to wait for the copy. No
    ``record_stream``, which would keep it until the host, far ahead of the device, happens to see the copy's end.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @override
    def _start(self, device_bytes: Tensor, region: Region, *, outward: bool) -> Flight:
        current = torch.cuda.current_stream(device_bytes.device)
        self._side.wait_stream(current)  # that wrote these bytes, or used this memory before
        host_bytes = region.bytes[: device_bytes.numel()]
        with torch.cuda.stream(self._side):
            if outward:
                host_bytes.copy_(device_bytes, non_blocking=True)
            else:
                device_bytes.copy_(host_bytes, non_blocking=True)
        if current != torch.cuda.default_stream(device_bytes.device):
            # It may be another stream's memory, which waiting on this one does not protect.
            device_bytes.record_stream(self._side)
        over = torch.cuda.Event()  # type: ignore[no-untyped-call]
        over.record(self._side)
        return _StreamFlight(next(self._numbers), device_bytes, region, outward, current, over=over)

    @override
    def _is_over(self, flight: Flight) -> bool:
        assert isinstance(flight, _StreamFlight)
        return bool(flight.over.query())  # type: ignore[no-untyped-call]

    @override
    def _wait(self, flight: Flight, stream: torch.cuda.Stream | None) -> None:
        assert isinstance(flight, _StreamFlight)
        assert stream is not None
        stream.wait_event(flight.over)

    @override
    def _finish(self) -> None:
        for flight in (*self._outward, *self._homeward):
            self._release(flight)


@dataclass(eq=False, slots=True)
class _Job(Flight):
    side: torch.cuda.Stream | None = None
    ready: torch.cuda.Event | None = None
    over: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None

    def run(self) -> None:
        stored = self.region.bytes[: self.bytes.numel()]
        source, target = (self.bytes, stored) if self.outward else (stored, self.bytes)
        if self.side is None:
            # Not copy_(), which would have all cores copy, and wait for those that the computation has just then.
            ctypes.memmove(target.data_ptr(), source.data_ptr(), source.numel())
        else:
            assert self.ready is not None
            with torch.cuda.stream(self.side):
                self.side.wait_event(self.ready)
                target.copy_(source)
                self.side.synchronize()
        self.region.let_go()


class ThreadMover(Mover):
    """Copies on a thread of its own: for memory of a CPU, and between any device and a file.

    A copy between a GPU and memory that is not pinned holds its caller up, which here is that thread.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        on_gpu = device.type == "cuda"
        self._side = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        # The thread knows only the queue, so that it ends with the mover, closed or not.
        self._thread = threading.Thread(target=_work, args=(self._jobs,), name="lightning-accel-offload", daemon=True)
        self._thread.start()
        weakref.finalize(self, self._jobs.put, None)

    @override
    def _start(self, device_bytes: Tensor, region: Region, *, outward: bool) -> Flight:
        job = _Job(next(self._numbers), device_bytes, region, outward, None, side=self._side)
        if self._side is not None:
            job.stream = torch.cuda.current_stream(device_bytes.device)
            job.ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            job.ready.record(job.stream)
        self._jobs.put(job)
        return job

    @override
    def _is_over(self, flight: Flight) -> bool:
        assert isinstance(flight, _Job)
        return flight.over.is_set()

    @override
    def _wait(self, flight: Flight, stream: torch.cuda.Stream | None) -> None:
        # The copy has ended on the device, too, before its thread says so: no stream has anything left to wait for.
        assert isinstance(flight, _Job)
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


def _work(jobs: queue.SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        try:
            job.run()
        except BaseException as error:
            job.error = error.with_traceback(None)  # which would hold the job
        over = job.over
        # Whoever asked for the copy holds it until it is over. So no memory is ever freed on this thread, where a
        # profiler of the other one would not see it.
        del job
        over.set()
