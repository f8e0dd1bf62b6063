"""The clocks: the host's, and a GPU's own timeline by events. No other file reads a clock.

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

# Taken once: what somebody exchanges in `time`, as tests do, neither stops nor counts our clocks.
monotonic, perf_counter = time.monotonic, time.perf_counter
perf_counter_ns, thread_time = time.perf_counter_ns, time.thread_time


def seconds() -> float:
    """The time in seconds, by the clock that times steps."""
    return perf_counter_ns() / 1e9


class Stopwatch:
    """Measures how long something takes on the host, once: a compilation, a file that is loaded.

    Args:
        of_thread: Whether it counts the processor time of the calling thread, and not the time that passes.
    """

    def __init__(self, *, of_thread: bool = False) -> None:
        self._now = thread_time if of_thread else perf_counter
        self._began = self._now()

    def seconds(self) -> float:
        """The seconds since the stopwatch began."""
        return self._now() - self._began

    def lap(self) -> float:
        """Returns the seconds since the stopwatch began, and begins again."""
        took = self.seconds()
        self._began += took
        return took


class Deadline:
    """A moment that is some seconds away. Nothing is measured by it."""

    def __init__(self, seconds: float) -> None:
        self._at = monotonic() + seconds

    def left_s(self) -> float:
        """The seconds until then; negative once it is over."""
        return self._at - monotonic()

    def is_over(self) -> bool:
        return monotonic() >= self._at


class HostClock:
    """The host's clock. It is right on a CPU, where a call returns when its work is done.

    Attributes:
        mark: Returns the present instant.
        elapsed: From the second instant to the first, in units of ``unit_ms``.
        unit_ms: Milliseconds.
        is_host: Whether every instant that was marked is over.
    """

    is_host = True
    unit_ms = 1e-6

    def __init__(self) -> None:
        # Python's own functions, without a frame for each: a step calls them eight times.
        self.mark: Callable[[], Any] = perf_counter_ns
        self.elapsed: Callable[[Any, Any], float] = operator.sub

    def ms_between(self, earlier: Any, later: Any) -> float:
        """Milliseconds from one instant to another; on a GPU once it has passed both."""
        return self.elapsed(later, earlier) * self.unit_ms

    def has_passed(self, mark: Any) -> bool:
        """Whether the device has come to this instant."""
        return True

    def wait_for(self, mark: Any) -> None:
        """Waits until the device has come to this instant."""

    def follow_stream(self) -> None:
        """Marks from the next instant on in the stream that is current then."""

    def release(self, marks: Iterable[Any]) -> None:
        """Takes instants back that nobody asks for any more."""


class EventClock(HostClock):
    """A device's own timeline: every instant is an event in its stream, read once the device has passed it.

    Events return to a pool when they are released, so memory does not grow with the run.
    """

    is_host = False
    unit_ms = 1.0

    def __init__(self, new_event: Callable[[], Any], current_stream: Callable[[], Any] = lambda: None) -> None:
        self._new_event, self._current_stream = new_event, current_stream
        self._pool: list[Any] = []
        self._stream: Any = None  # asked for where it is first needed
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
    """The clock that tells the time of ``device``."""
    if device.type != "cuda":
        return HostClock()
    import torch

    return EventClock(
        lambda: torch.cuda.Event(enable_timing=True),  # type: ignore[no-untyped-call]
        lambda: torch.cuda.current_stream(device),
    )


class Span:
    """The time from here to :meth:`stop` on a device; on a GPU between two events, which keeps nobody waiting."""

    def __init__(self, device: torch.device) -> None:
        self._clock = clock_for(device)
        self._began = self._ended = self._clock.mark()

    def stop(self) -> None:
        self._ended = self._clock.mark()

    def seconds(self) -> float:
        """The seconds taken. Waits for the device if it is not there yet."""
        self._clock.wait_for(self._ended)
        return self._clock.ms_between(self._began, self._ended) / 1e3
