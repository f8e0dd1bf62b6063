"""Clocks: the host's clock, and a GPU's timeline measured by events. No other file reads a clock.

Steps are timed by :mod:`~lightning_accel.core.step_timeline`, short calls by
:mod:`~lightning_accel.experiment.time_calls`.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch  # help and plans come without it

# Bound once, so that replacing functions of `time`, as tests do, does not affect these clocks.
monotonic, perf_counter = time.monotonic, time.perf_counter
perf_counter_ns, thread_time = time.perf_counter_ns, time.thread_time


def seconds() -> float:
    """Returns the time in seconds, by the clock that times steps."""
    return perf_counter_ns() / 1e9


class Stopwatch:
    """Measures how long one operation takes on the host, such as a compilation or loading a file.

    Args:
        of_thread: Whether to count the calling thread's processor time instead of elapsed time.
    """

    def __init__(self, *, of_thread: bool = False) -> None:
        self._now = thread_time if of_thread else perf_counter
        self._began = self._now()

    def seconds(self) -> float:
        """Returns the seconds since the start or the last lap."""
        return self._now() - self._began

    def lap(self) -> float:
        """Returns the seconds since the start or the last lap, and starts the next lap."""
        took = self.seconds()
        self._began += took
        return took


class Deadline:
    """A point in time some seconds ahead. It is not used for measurements."""

    def __init__(self, seconds: float) -> None:
        self._at = monotonic() + seconds

    def left_s(self) -> float:
        """Returns the remaining seconds; negative after the deadline."""
        return self._at - monotonic()

    def is_over(self) -> bool:
        return monotonic() >= self._at


class HostClock:
    """The host's clock. It is accurate for a CPU, where a call returns when its work is done.

    Attributes:
        mark: Returns the current instant.
        elapsed: Returns the time from its second argument to its first, in units of ``unit_ms``.
        unit_ms: The unit of ``elapsed`` in milliseconds.
        is_host: Whether every marked instant has already passed.
    """

    is_host = True
    unit_ms = 1e-6

    def __init__(self) -> None:
        # Built-in functions need no Python frame. A step calls them eight times.
        self.mark: Callable[[], Any] = perf_counter_ns
        self.elapsed: Callable[[Any, Any], float] = operator.sub

    def ms_between(self, earlier: Any, later: Any) -> float:
        """Returns the milliseconds between two instants. On a GPU the device must have passed both."""
        return self.elapsed(later, earlier) * self.unit_ms

    def has_passed(self, mark: Any) -> bool:
        """Returns whether the device has reached this instant."""
        return True

    def wait_for(self, mark: Any) -> None:
        """Waits until the device has reached this instant."""

    def follow_stream(self) -> None:
        """Records later instants in the stream that is current at the next one."""

    def release(self, marks: Iterable[Any]) -> None:
        """Takes back instants that are no longer needed."""


class EventClock(HostClock):
    """A GPU's timeline: each instant is an event in the device's stream, read after the device has passed it.

    Released events return to a pool, so memory does not grow with the run.
    """

    is_host = False
    unit_ms = 1.0

    def __init__(self, new_event: Callable[[], Any], current_stream: Callable[[], Any] = lambda: None) -> None:
        self._new_event, self._current_stream = new_event, current_stream
        self._pool: list[Any] = []
        self._stream: Any = None  # looked up at first use
        self.mark = self._record
        self.elapsed = lambda event, earlier: earlier.elapsed_time(event)

    def has_passed(self, mark: Any) -> bool:
        return bool(mark.query())

    def wait_for(self, mark: Any) -> None:
        mark.synchronize()

    def follow_stream(self) -> None:
        self._stream = None

    def release(self, marks: Iterable[Any]) -> None:
        self._pool += {id(mark): mark for mark in marks if mark is not None}.values()

    def _record(self) -> Any:
        if self._stream is None:
            self._stream = self._current_stream()
        event = self._pool.pop() if self._pool else self._new_event()
        event.record(self._stream)
        return event


def clock_for(device: torch.device) -> HostClock:
    """Returns the clock that measures work on ``device``."""
    if device.type != "cuda":
        return HostClock()
    import torch

    return EventClock(
        lambda: torch.cuda.Event(enable_timing=True),  # type: ignore[no-untyped-call]
        lambda: torch.cuda.current_stream(device),
    )


class Span:
    """The time from creation to :meth:`stop` on a device. On a GPU, two events measure it without blocking the host."""

    def __init__(self, device: torch.device) -> None:
        self._clock = clock_for(device)
        self._began = self._ended = self._clock.mark()

    def stop(self) -> None:
        self._ended = self._clock.mark()

    def seconds(self) -> float:
        """Returns the measured seconds. Waits for the device if necessary."""
        self._clock.wait_for(self._ended)
        return self._clock.ms_between(self._began, self._ended) / 1e3
