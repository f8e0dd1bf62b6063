"""``torch.cuda.Stream``, ``torch.cuda.Event``, and those that autograd's engine makes in C++."""

from __future__ import annotations

import ctypes
import itertools
import time
from collections import OrderedDict
from typing import Any

import torch

from simulated_cuda import captures
from simulated_cuda.captures import Capture
from simulated_cuda.streams import (
    LIBRARY,
    TIMELINE,
    Key,
    Mark,
    current_device,
    current_stream,
    set_stream,
)

_numbers = itertools.count(1)


def device_index(device: Any) -> int:
    """Of whatever torch takes for a device; the current one's for None."""
    if device is None:
        return current_device()
    if isinstance(device, int):
        return current_device() if device < 0 else device
    index = torch.device(device).index
    return current_device() if index is None else index


class Stream:
    """As :class:`torch.cuda.Stream`: no stream waits for the default one unless it is told to."""

    def __init__(self, device: Any = None, priority: int = 0, stream_id: int | None = None, **_: Any) -> None:
        self.device_index = device_index(device)
        self.device = torch.device("cuda", self.device_index)
        self.stream_id = next(_numbers) if stream_id is None else stream_id
        self.priority = priority

    @property
    def key(self) -> Key:
        """Its device's index, and its number."""
        return self.device_index, self.stream_id

    @property
    def cuda_stream(self) -> int:
        return self.stream_id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        return f"<torch.cuda.Stream device={self.device} cuda_stream={self.cuda_stream:#x}>"

    def is_capturing(self) -> bool:
        return captures.of_stream(self.key) is not None

    def query(self) -> bool:
        captures.wait_for_streams([self.key])
        mark = TIMELINE.mark(self.key)
        if mark.is_reached:
            TIMELINE.wait_on_host([mark])
        return mark.is_reached

    def synchronize(self) -> None:
        captures.wait_for_streams([self.key])
        TIMELINE.wait_on_host([TIMELINE.mark(self.key)])

    def record_event(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def __enter__(self) -> Stream:
        self._before = current_stream(self.device_index)
        set_stream(self.key)
        return self

    def __exit__(self, *_: object) -> None:
        set_stream(self._before)


class ExternalStream(Stream):
    """As :class:`torch.cuda.ExternalStream`: a stream that others have made."""

    def __init__(self, stream_ptr: int, device: Any = None, **_: Any) -> None:
        super().__init__(device=device, stream_id=stream_ptr)


class Event:
    """As :class:`torch.cuda.Event`."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False,
                 external: bool = False) -> None:  # fmt: skip
        self.enable_timing = enable_timing
        self.device = torch.device("cuda", current_device())
        self._mark: Mark | None = None
        self._stream: Key | None = None
        self._capture: Capture | None = None
        self._time = 0.0

    def record(self, stream: Stream | None = None) -> None:
        self._stream = current_stream() if stream is None else stream.key
        self._mark, self._capture = TIMELINE.mark(self._stream), captures.of_launch(self._stream)
        self._time = max(time.perf_counter(), self._mark.ready_at)

    def wait(self, stream: Stream | None = None) -> None:
        _wait(current_stream() if stream is None else stream.key, self._mark, self._stream, self._capture)

    def query(self) -> bool:
        self._check_host_may_wait()
        if self._mark is None:
            return True
        if self._mark.is_reached:
            TIMELINE.wait_on_host([self._mark])
        return self._mark.is_reached

    def synchronize(self) -> None:
        self._check_host_may_wait()
        if self._mark is not None:
            TIMELINE.wait_on_host([self._mark])

    def _check_host_may_wait(self) -> None:
        if self._capture in captures.ACTIVE and self._capture is not None:
            raise self._capture.spoil(captures.CAPTURED_EVENT)
        captures.unsafe_call()

    def elapsed_time(self, end_event: Event) -> float:
        if not (self.enable_timing and end_event.enable_timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self._mark is None or end_event._mark is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        if not (self._mark.is_reached and end_event._mark.is_reached):
            raise ValueError("Both events must be completed before calculating elapsed time.")
        return (end_event._time - self._time) * 1e3

    @property
    def cuda_event(self) -> int:
        return id(self)


def _wait(stream: Key, mark: Mark | None, recorded_on: Key | None, recorded_in: Capture | None) -> None:
    if mark is None or stream == recorded_on:
        return
    still = recorded_in if recorded_in in captures.ACTIVE else None
    captures.wait_between(stream, still, recorded_on)
    TIMELINE.wait(stream, mark)


_MOST_EVENTS = 4096
_of_the_engine: OrderedDict[int, tuple[Mark, Key, Capture | None]] = OrderedDict()
"""By number. The engine waits for its events at once: old ones are of no use."""


def _on_record(event: int, device: int, stream: int) -> None:
    key = (device, stream)
    with _refusing():
        _of_the_engine[event] = (TIMELINE.mark(key), key, captures.of_launch(key))
        if len(_of_the_engine) > _MOST_EVENTS:
            _of_the_engine.popitem(last=False)


def _on_wait(event: int, device: int, stream: int) -> None:
    if event in _of_the_engine:
        with _refusing():
            _wait((device, stream), *_of_the_engine[event])


def _on_pinned_allocation() -> None:
    # Torch asks its events how far they are before it gives out pinned memory, new or not.
    with _refusing():
        captures.unsafe_call()


class _refusing:  # noqa: N801
    """Hands an error over to C++, which raises it where it was called."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if error is not None:
            LIBRARY.refuse(str(error).encode())
        return True


_ON_EVENT = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int, ctypes.c_int64)
_CALLED_BACK = _ON_EVENT(_on_record), _ON_EVENT(_on_wait), ctypes.CFUNCTYPE(None)(_on_pinned_allocation)


def install() -> None:
    """Has autograd's engine, and whoever allocates pinned memory, report what they do."""
    LIBRARY.report_to(*_CALLED_BACK)
