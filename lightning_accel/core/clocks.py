"""Time per training step, told apart into waiting for data and working, without ever stopping the device for it."""

from __future__ import annotations

import operator
import time
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from typing_extensions import override

if TYPE_CHECKING:
    import torch  # help and plans come without it

# Taken once, and by all from here: what somebody exchanges in `time`, as tests do, neither stops nor counts our clocks.
monotonic, perf_counter = time.monotonic, time.perf_counter
perf_counter_ns, thread_time_ns = time.perf_counter_ns, time.thread_time_ns


def seconds() -> float:
    """The time in seconds, by the clock that times steps."""
    return perf_counter_ns() / 1e9


class Stopwatch:
    """Measures how long something takes on the host, once: a compilation, a file that is loaded."""

    def __init__(self) -> None:
        self._began = perf_counter()

    def seconds(self) -> float:
        """The seconds since the stopwatch began."""
        return perf_counter() - self._began

    def lap(self) -> float:
        """Returns the seconds since the stopwatch began, and begins again."""
        now = perf_counter()
        took, self._began = now - self._began, now
        return took


class Deadline:
    """A moment that is some seconds away. No time is measured by it."""

    def __init__(self, seconds: float) -> None:
        self._at = monotonic() + seconds

    def left_s(self) -> float:
        """The seconds until then; negative once it is over."""
        return self._at - monotonic()

    def is_over(self) -> bool:
        return monotonic() >= self._at


@dataclass
class Tally:
    """What the steps of an epoch took."""

    step_ms: array[float] = field(default_factory=lambda: array("d"))  # of each that was timed by itself, working
    # Of each, working, waiting for data and the gap before it.
    cycle_ms: array[float] = field(default_factory=lambda: array("d"))
    each_wait_ms: array[float] = field(default_factory=lambda: array("d"))  # of each, waiting for data
    samples: int = 0  # how many samples the steps trained on
    # Of each step with a backward pass, what it took from the cycle's begin to the first one.
    before_backward_ms: array[float] = field(default_factory=lambda: array("d"))

    @property
    def train_ms(self) -> float:
        """All cycles, summed."""
        return sum(self.cycle_ms)

    @property
    def wait_ms(self) -> float:
        """Waiting for data, summed."""
        return sum(self.each_wait_ms)


class StepClock:
    """Cuts an epoch into cycles, one a training step; each runs from the end of the step before it to its own end.

    A cycle has three parts: the *gap* before its first fetch (loggers, progress bar), *waiting* inside fetches, and
    the *step*, which is all the rest. :meth:`pause` takes out what is not training: the next cycle then begins with
    its first fetch. This clock is the host's: right on CPU, where a call returns when its work is done.

    Attributes:
        timed: The steps that count.
        apart: The steps that the logger itself slowed down.
    """

    def __init__(self) -> None:
        # Functions of Python's own, without a frame for each: a step calls them eight times.
        self._mark: Callable[[], Any] = perf_counter_ns  # the instant that the device has come to
        self._elapsed: Callable[[Any, Any], float] = operator.sub  # from the second mark to the first
        self._unit_ms = 1e-6
        self.restart()

    def restart(self) -> None:
        """Forgets everything, for a new epoch."""
        self.timed, self.apart = Tally(), Tally()
        self._began: Any = None
        self._fetches: list[Any] = []  # begin, end, begin, end, ...
        self._backward: Any = None

    @property
    def is_open(self) -> bool:
        """Whether a cycle has begun, and has not ended."""
        return bool(self._fetches)

    @property
    def is_in_step(self) -> bool:
        """Whether time that passes now is a step's: a cycle is open, and no fetch."""
        return self.is_open and len(self._fetches) % 2 == 0

    def fetch_began(self) -> None:
        self._fetches.append(self._mark())

    def fetch_ended(self) -> None:
        self._fetches.append(self._mark())

    def step_began(self) -> None:
        """Opens the cycle if no fetch has."""
        if not self._fetches:
            self._fetches += [now := self._mark(), now]

    def backward_began(self) -> None:
        """Marks the step's first backward pass. Within a step only."""
        if self._fetches and self._backward is None:
            self._backward = self._mark()

    def step_ended(self, samples: int, is_apart: bool = False) -> None:
        ended = self._mark()
        if self._fetches:
            self._complete(self._began, self._fetches, self._backward, ended, samples, is_apart, 0)
        self._began, self._fetches, self._backward = ended, [], None

    def steps_ended(self, steps: int, samples: int) -> int:
        """Ends steps of which nothing else was told: their cycles are equal parts of the time since the last mark.

        Of that they are taken to have waited for data as the latest ones did.

        Returns:
            How many count: none where there was a pause.
        """
        began, self._began = self._began, self._mark()
        if began is None:
            return 0
        self._complete(began, [began, began], None, self._began, samples, False, steps)
        return steps

    def pause(self) -> None:
        """Leaves the gap that is running out of the time. Within a cycle, it does nothing."""
        if not self._fetches:
            self._began = None

    def settle(self) -> None:
        """Completes both tallies. The only call that may wait for the device."""

    def mark(self) -> Any:
        """The instant that the device will have come to, for :meth:`ms_between`."""
        return self._mark()

    def ms_between(self, earlier: Any, later: Any) -> float:
        """Milliseconds from one mark to another; on a GPU once it has passed both."""
        return self._elapsed(later, earlier) * self._unit_ms

    def has_passed(self, mark: Any) -> bool:
        """Whether the device has come to a mark."""
        return True

    def wait_for(self, mark: Any) -> None:
        """Waits until the device has come to a mark."""

    def _complete(self, *cycle: Any) -> None:
        began, fetches, backward, ended, samples, is_apart, steps = cycle
        elapsed, ms = self._elapsed, self._unit_ms
        opened = fetches[0]
        waited = elapsed(fetches[1], opened)
        if len(fetches) > 2:
            waited += sum(map(elapsed, fetches[3::2], fetches[2::2]))
        took = elapsed(ended, opened)
        tally = self.apart if is_apart else self.timed
        tally.samples += samples
        if steps:  # that ended together
            waited = took * sum(tally.each_wait_ms[_LATEST]) / (sum(tally.cycle_ms[_LATEST]) or 1.0)
            tally.cycle_ms.extend([took * ms / steps] * steps)
            tally.each_wait_ms.extend([waited * ms / steps] * steps)
            return
        tally.step_ms.append((took - waited) * ms)
        if began is not None:
            took += elapsed(opened, began)
        tally.cycle_ms.append(took * ms)
        tally.each_wait_ms.append(waited * ms)
        if backward is not None:
            tally.before_backward_ms.append(elapsed(backward, opened if began is None else began) * ms)


_LATEST = slice(-8, None)
_ENDED = 3  # the place of that mark in a cycle


class EventClock(StepClock):
    """By the device's own timeline: every mark is an event in its stream, read once the device has passed it.

    Waiting is then what the *device* waited: a fetch that is over before the device has worked off its queue costs
    nothing. Events return to a pool as soon as they are read, so memory does not grow with the epoch.

    Which stream training runs on is asked at the start of an epoch.
    """

    def __init__(self, new_event: Callable[[], Any], current_stream: Callable[[], Any] = lambda: None) -> None:
        self._new_event = new_event
        self._current_stream = current_stream
        self._pending: deque[tuple[Any, ...]] = deque()
        self._pool: list[Any] = []
        super().__init__()
        self._mark, self._unit_ms = self._record, 1.0
        self._elapsed = lambda event, earlier: earlier.elapsed_time(event)

    @override
    def restart(self) -> None:
        super().restart()
        self._pending.clear()
        self._stream = self._current_stream()

    @override
    def settle(self) -> None:
        if self._pending:
            self._pending[-1][_ENDED].synchronize()
        while self._pending:
            self._read_next()

    @override
    def has_passed(self, mark: Any) -> bool:
        return bool(mark.query())

    @override
    def wait_for(self, mark: Any) -> None:
        mark.synchronize()

    @override
    def _complete(self, *cycle: Any) -> None:
        self._pending.append(cycle)
        # query() only asks; all marks are in one stream, so what came before a finished event has finished too.
        while self._pending and self._pending[0][_ENDED].query():
            self._read_next()

    def _record(self) -> Any:
        event = self._pool.pop() if self._pool else self._new_event()
        event.record(self._stream)
        return event

    def _read_next(self) -> None:
        super()._complete(*(cycle := self._pending.popleft()))
        began, fetches, backward, *_ = cycle
        # A cycle's end stays: it is the next one's begin. A step without a fetch has one mark twice.
        self._pool += {id(mark): mark for mark in (*fetches, backward, began) if mark is not None}.values()


def clock_for(device: torch.device) -> StepClock:
    """The clock that tells the truth on ``device``."""
    if device.type != "cuda":
        return StepClock()
    import torch

    return EventClock(
        lambda: torch.cuda.Event(enable_timing=True),  # type: ignore[no-untyped-call]
        lambda: torch.cuda.current_stream(device),
    )
