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

    def add(
        self, step_ms: float, gap_ms: float, wait_ms: float, samples: int, before_backward_ms: float | None
    ) -> None:
        self.step_ms.append(step_ms)
        self.train_ms += step_ms + gap_ms + wait_ms
        self.wait_ms += wait_ms
        self.samples += samples
        if before_backward_ms is not None:
            self.before_backward_ms.append(before_backward_ms)


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
        self.timed = Tally()
        self.apart = Tally()

    @property
    @abstractmethod
    def is_open(self) -> bool:
        """Whether a cycle has begun, and has not ended."""

    @abstractmethod
    def fetch_began(self) -> None: ...

    @abstractmethod
    def fetch_ended(self) -> None: ...

    @abstractmethod
    def step_began(self) -> None:
        """Opens the cycle if no fetch has."""

    @abstractmethod
    def backward_began(self) -> None:
        """Marks the step's first backward pass. Within a step only."""

    @abstractmethod
    def step_ended(self, samples: int, is_apart: bool = False) -> None: ...

    @abstractmethod
    def pause(self) -> None:
        """Leaves the gap that is running out of the time. Within a cycle, it does nothing."""

    def restart(self) -> None:
        """Forgets everything, for a new epoch."""
        self.timed = Tally()
        self.apart = Tally()

    @abstractmethod
    def settle(self) -> None:
        """Completes both tallies. The only call that may wait for the device."""


class HostClock(StepClock):
    """By the host's clock: right on CPU, where a call returns when its work is done."""

    def __init__(self) -> None:
        super().__init__()
        self._began_ns: int | None = None
        self._fetch_began_ns = 0
        self._gap_ns = 0
        self._wait_ns = 0
        self._is_open = False
        self._before_backward_ns: int | None = None

    @property
    @override
    def is_open(self) -> bool:
        return self._is_open

    @override
    def fetch_began(self) -> None:
        self._fetch_began_ns = now = time.perf_counter_ns()
        if not self._is_open:
            self._is_open = True
            if self._began_ns is None:
                self._began_ns = now
            self._gap_ns = now - self._began_ns

    @override
    def fetch_ended(self) -> None:
        self._wait_ns += time.perf_counter_ns() - self._fetch_began_ns

    @override
    def step_began(self) -> None:
        if not self._is_open:
            self.fetch_began()

    @override
    def backward_began(self) -> None:
        if self._is_open and self._before_backward_ns is None:
            assert self._began_ns is not None
            self._before_backward_ns = time.perf_counter_ns() - self._began_ns

    @override
    def step_ended(self, samples: int, is_apart: bool = False) -> None:
        now = time.perf_counter_ns()
        if self._is_open:
            assert self._began_ns is not None
            step_ns = now - self._began_ns - self._gap_ns - self._wait_ns
            tally = self.apart if is_apart else self.timed
            before_backward_ms = None if self._before_backward_ns is None else self._before_backward_ns * 1e-6
            tally.add(step_ns * 1e-6, self._gap_ns * 1e-6, self._wait_ns * 1e-6, samples, before_backward_ms)
        self._reset(began_ns=now)

    @override
    def pause(self) -> None:
        if not self._is_open:
            self._began_ns = None

    @override
    def restart(self) -> None:
        super().restart()
        self._reset(began_ns=None)

    @override
    def settle(self) -> None:
        """The host has read every mark as it was made."""

    def _reset(self, began_ns: int | None) -> None:
        self._began_ns = began_ns
        self._is_open = False
        self._wait_ns = 0
        self._before_backward_ns = None


class Event(Protocol):
    """The part of :class:`torch.cuda.Event` that :class:`EventClock` needs."""

    def record(self, stream: Any = None) -> None: ...
    def query(self) -> bool: ...
    def synchronize(self) -> None: ...
    def elapsed_time(self, end_event: Any) -> float: ...


class _Cycle(NamedTuple):
    began: Event | None
    fetches: list[Event]  # begin, end, begin, end, ...
    backward: Event | None
    ended: Event
    samples: int
    is_apart: bool


class EventClock(StepClock):
    """By the device's own timeline: every mark is an event in its stream, read once the device has passed it.

    Waiting is then what the *device* waited: a fetch that is over before the device has worked off its queue costs
    nothing. Events return to a pool as soon as they are read, so memory does not grow with the epoch.

    Args:
        new_event: Makes an event that keeps its time.
        current_stream: The stream that training runs on; asked at the start of an epoch.
    """

    def __init__(self, new_event: Callable[[], Event], current_stream: Callable[[], Any] = lambda: None) -> None:
        super().__init__()
        self._new_event = new_event
        self._current_stream = current_stream
        self._stream = current_stream()
        self._began: Event | None = None
        self._fetches: list[Event] = []
        self._backward: Event | None = None
        self._pending: deque[_Cycle] = deque()
        self._pool: list[Event] = []

    @classmethod
    def for_cuda(cls, device: torch.device) -> EventClock:
        return cls(
            lambda: torch.cuda.Event(enable_timing=True),  # type: ignore[no-untyped-call]
            lambda: torch.cuda.current_stream(device),
        )

    @property
    @override
    def is_open(self) -> bool:
        return bool(self._fetches)

    @override
    def fetch_began(self) -> None:
        self._fetches.append(self._record())

    @override
    def fetch_ended(self) -> None:
        self._fetches.append(self._record())

    @override
    def step_began(self) -> None:
        if not self._fetches:
            self.fetch_began()
            self.fetch_ended()

    @override
    def backward_began(self) -> None:
        if self._fetches and self._backward is None:
            self._backward = self._record()

    @override
    def step_ended(self, samples: int, is_apart: bool = False) -> None:
        ended = self._record()
        if self._fetches:
            self._pending.append(_Cycle(self._began, self._fetches, self._backward, ended, samples, is_apart))
        self._began, self._fetches, self._backward = ended, [], None
        # query() only asks; all marks are in one stream, so what came before a finished event has finished too.
        while self._pending and self._pending[0].ended.query():
            self._read(self._pending.popleft())

    @override
    def pause(self) -> None:
        if not self._fetches:
            self._began = None

    @override
    def restart(self) -> None:
        super().restart()
        self._pending.clear()
        self._began, self._fetches, self._backward = None, [], None
        self._stream = self._current_stream()

    @override
    def settle(self) -> None:
        if self._pending:
            self._pending[-1].ended.synchronize()
        while self._pending:
            self._read(self._pending.popleft())

    def _record(self) -> Event:
        event = self._pool.pop() if self._pool else self._new_event()
        event.record(self._stream)
        return event

    def _read(self, cycle: _Cycle) -> None:
        opened = cycle.fetches[0]
        began = opened if cycle.began is None else cycle.began
        gap_ms = 0.0 if cycle.began is None else began.elapsed_time(opened)
        wait_ms = sum(a.elapsed_time(b) for a, b in zip(cycle.fetches[::2], cycle.fetches[1::2], strict=True))
        step_ms = began.elapsed_time(cycle.ended) - gap_ms - wait_ms
        before_backward_ms = None if cycle.backward is None else began.elapsed_time(cycle.backward)
        tally = self.apart if cycle.is_apart else self.timed
        tally.add(step_ms, gap_ms, wait_ms, cycle.samples, before_backward_ms)
        self._pool += cycle.fetches
        if cycle.backward is not None:
            self._pool.append(cycle.backward)
        if cycle.began is not None:
            self._pool.append(cycle.began)  # no later cycle refers to it: each has its own end as the next one's begin


def clock_for(device: torch.device) -> StepClock:
    """The clock that tells the truth on ``device``."""
    return EventClock.for_cuda(device) if device.type == "cuda" else HostClock()
