"""Time per training step, told apart into waiting for data and working, without ever stopping the device for it."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from typing_extensions import override


@dataclass
class Tally:
    """What the steps of an epoch took.

    Attributes:
        step_ms: The working time of each step.
        train_ms: Working, waiting for data and the gaps in between, summed.
        wait_ms: Waiting for data, summed.
        samples: How many samples the steps trained on.
        before_backward_ms: Of each step with a backward pass, what it took from the cycle's begin to the first one.
    """

    step_ms: array[float] = field(default_factory=lambda: array("d"))
    train_ms: float = 0.0
    wait_ms: float = 0.0
    samples: int = 0
    before_backward_ms: array[float] = field(default_factory=lambda: array("d"))


class Cycle(NamedTuple):
    """The marks of one training step, each an instant as its clock keeps it."""

    began: Any  # None after a pause: then it begins with its first fetch
    fetches: list[Any]  # begin, end, begin, end, ...
    backward: Any
    ended: Any
    samples: int
    is_apart: bool


class StepClock(ABC):
    """Cuts an epoch into cycles, one a training step; each runs from the end of the step before it to its own end.

    A cycle has three parts: the *gap* before its first fetch (loggers, progress bar), *waiting* inside fetches, and
    the *step*, which is all the rest. :meth:`pause` takes out what is not training: the next cycle then begins with
    its first fetch.

    Attributes:
        timed: The steps that count.
        apart: The steps that the logger itself slowed down.
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Forgets everything, for a new epoch."""
        self.timed, self.apart = Tally(), Tally()
        self._begin(None)

    @property
    def is_open(self) -> bool:
        """Whether a cycle has begun, and has not ended."""
        return bool(self._fetches)

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
            self._complete(Cycle(self._began, self._fetches, self._backward, ended, samples, is_apart))
        self._begin(ended)

    def pause(self) -> None:
        """Leaves the gap that is running out of the time. Within a cycle, it does nothing."""
        if not self._fetches:
            self._began = None

    @abstractmethod
    def settle(self) -> None:
        """Completes both tallies. The only call that may wait for the device."""

    @abstractmethod
    def _mark(self) -> Any:
        """The instant that the device has come to."""

    @abstractmethod
    def _ms(self, begin: Any, end: Any) -> float:
        """From one mark to another."""

    @abstractmethod
    def _complete(self, cycle: Cycle) -> None:
        """Has :meth:`_add` called with a cycle, once its marks can be read."""

    def _begin(self, began: Any) -> None:
        self._began = began
        self._fetches: list[Any] = []
        self._backward: Any = None

    def _add(self, cycle: Cycle) -> None:
        fetches = cycle.fetches
        began = fetches[0] if cycle.began is None else cycle.began
        wait_ms = 0.0
        for at in range(0, len(fetches) - 1, 2):
            wait_ms += self._ms(fetches[at], fetches[at + 1])
        train_ms = self._ms(began, cycle.ended)
        tally = self.apart if cycle.is_apart else self.timed
        tally.step_ms.append(train_ms - self._ms(began, fetches[0]) - wait_ms)
        tally.train_ms += train_ms
        tally.wait_ms += wait_ms
        tally.samples += cycle.samples
        if cycle.backward is not None:
            tally.before_backward_ms.append(self._ms(began, cycle.backward))


class HostClock(StepClock):
    """By the host's clock: right on CPU, where a call returns when its work is done. A mark is in nanoseconds."""

    @override
    def settle(self) -> None: ...

    @override
    def _mark(self) -> int:
        return time.perf_counter_ns()

    @override
    def _ms(self, begin: int, end: int) -> float:
        return (end - begin) * 1e-6

    @override
    def _complete(self, cycle: Cycle) -> None:
        self._add(cycle)


class Event(Protocol):
    """The part of :class:`torch.cuda.Event` that :class:`EventClock` needs."""

    def record(self, stream: Any = None) -> None: ...
    def query(self) -> bool: ...
    def synchronize(self) -> None: ...
    def elapsed_time(self, end_event: Any) -> float: ...


class EventClock(StepClock):
    """By the device's own timeline: every mark is an event in its stream, read once the device has passed it.

    Waiting is then what the *device* waited: a fetch that is over before the device has worked off its queue costs
    nothing. Events return to a pool as soon as they are read, so memory does not grow with the epoch.

    Args:
        new_event: Makes an event that keeps its time.
        current_stream: The stream that training runs on; asked at the start of an epoch.
    """

    def __init__(self, new_event: Callable[[], Event], current_stream: Callable[[], Any] = lambda: None) -> None:
        self._new_event = new_event
        self._current_stream = current_stream
        self._pending: deque[Cycle] = deque()
        self._pool: list[Event] = []
        super().__init__()

    @classmethod
    def for_cuda(cls, device: torch.device) -> EventClock:
        return cls(
            lambda: torch.cuda.Event(enable_timing=True),  # type: ignore[no-untyped-call]
            lambda: torch.cuda.current_stream(device),
        )

    @override
    def restart(self) -> None:
        super().restart()
        self._pending.clear()
        self._stream = self._current_stream()

    @override
    def settle(self) -> None:
        if self._pending:
            self._pending[-1].ended.synchronize()
        while self._pending:
            self._add(self._pending.popleft())

    @override
    def _mark(self) -> Event:
        event = self._pool.pop() if self._pool else self._new_event()
        event.record(self._stream)
        return event

    @override
    def _ms(self, begin: Event, end: Event) -> float:
        return begin.elapsed_time(end)

    @override
    def _complete(self, cycle: Cycle) -> None:
        self._pending.append(cycle)
        # query() only asks; all marks are in one stream, so what came before a finished event has finished too.
        while self._pending and self._pending[0].ended.query():
            self._add(self._pending.popleft())

    @override
    def _add(self, cycle: Cycle) -> None:
        super()._add(cycle)
        # A cycle's end stays: it is the next one's begin. A step without a fetch has one mark twice.
        marks = (*cycle.fetches, cycle.backward, cycle.began)
        self._pool += {id(mark): mark for mark in marks if mark is not None}.values()


def clock_for(device: torch.device) -> StepClock:
    """The clock that tells the truth on ``device``."""
    return EventClock.for_cuda(device) if device.type == "cuda" else HostClock()
