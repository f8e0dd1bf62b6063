"""Streams and what they wait for: who is sure to have finished before whom.

Every stream has a vector clock: how far it, and every other stream that it has waited for, is sure to have come. A
kernel that uses memory after another is in order if its stream's clock has reached that other's tick.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from simulated_cuda import native

Key = tuple[int, int]
"""A stream: its device's index, and its own number, which is 0 for the default stream."""

Clock = dict[Key, int]

LIBRARY = native.load()


@dataclass(eq=False)
class Mark:
    """A point of a stream, which an event was recorded at: what has happened before, and when that is over."""

    clock: Clock
    ready_at: float  # as time.perf_counter() tells it

    @property
    def is_reached(self) -> bool:
        """Whether the device's work has come so far."""
        return time.perf_counter() >= self.ready_at


@dataclass(eq=False)
class _Progress:
    clock: Clock = field(default_factory=dict)
    ready_at: float = 0.0


class Timeline:
    """All streams of all devices, and the host, which launches their work and waits for it."""

    def __init__(self) -> None:
        self._streams: dict[Key, _Progress] = {}
        self._host: Clock = {}
        self.lock = threading.RLock()
        self.when_host_waited: Callable[[Clock], None] = lambda clock: None

    def _of(self, stream: Key) -> _Progress:
        return self._streams.setdefault(stream, _Progress())

    def clock(self, stream: Key) -> Clock:
        """What the next kernel on the stream is sure to come after."""
        progress = self._of(stream)
        _merge(progress.clock, self._host)
        return progress.clock

    def launch(self, stream: Key) -> int:
        """Has the stream do something; its tick."""
        with self.lock:
            clock = self.clock(stream)
            clock[stream] = clock.get(stream, 0) + 1
            return clock[stream]

    def keep_busy(self, stream: Key, seconds: float) -> None:
        """Has the stream's work end so much later."""
        progress = self._of(stream)
        progress.ready_at = max(progress.ready_at, time.perf_counter()) + seconds

    def mark(self, stream: Key) -> Mark:
        """The stream as it is now."""
        with self.lock:
            return Mark(dict(self.clock(stream)), self._of(stream).ready_at)

    def wait(self, stream: Key, mark: Mark) -> None:
        """Has a stream wait for a point of another."""
        with self.lock:
            progress = self._of(stream)
            _merge(progress.clock, mark.clock)
            progress.ready_at = max(progress.ready_at, mark.ready_at)

    def wait_on_host(self, marks: Iterable[Mark]) -> None:
        """Has the host wait: whatever is launched from now on comes after."""
        for mark in marks:
            while not mark.is_reached:
                time.sleep(1e-5)
            with self.lock:
                _merge(self._host, mark.clock)
        # Another thread that waits for the same copies may write to their memory as soon as it returns.
        with self.lock:
            self.when_host_waited(self._host)

    def marks_of(self, device: int) -> list[Mark]:
        """All streams of a device."""
        with self.lock:
            return [self.mark(stream) for stream in list(self._streams) if stream[0] == device]


def _merge(clock: Clock, other: Clock) -> None:
    for stream, tick in other.items():
        if clock.get(stream, 0) < tick:
            clock[stream] = tick


TIMELINE = Timeline()


def current_device() -> int:
    """The calling thread's."""
    return int(LIBRARY.get_device())


def current_stream(device: int | None = None) -> Key:
    """The calling thread's, of a device."""
    index = current_device() if device is None else device
    return index, int(LIBRARY.get_stream(index))


def set_stream(stream: Key) -> None:
    """Makes a stream the calling thread's current one of its device."""
    LIBRARY.set_stream(*stream)


def described(stream: Key) -> str:
    """As faults name it."""
    device, number = stream
    return f"stream {number} of cuda:{device}" if number else f"the default stream of cuda:{device}"
