"""The rules by which a capture of a CUDA graph is spoiled, by NVIDIA's documentation.

* In mode ``global``, a call that may wait for the device (an event's or a stream's query, a synchronisation, memory
  asked of the driver) fails in every thread and spoils the capture; in mode ``thread_local``, in its own thread only.
* To wait for a stream that is being captured, or for the whole device, spoils it in every mode.
* The default stream cannot be made to wait for captured work, nor captured work for what was not captured. The first is
  what a gradient's accumulation node does that was made on the default stream: autograd's engine has it wait.
* A stream that has come to belong to a capture has to be waited for before its end.

What was spoiled fails once more at its end. Then, as in torch 2.11, the allocator goes on believing that it is under
way.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from simulated_cuda.streams import Key, current_stream

NOT_PERMITTED = "CUDA error: operation not permitted when stream is capturing"
INVALIDATED = "CUDA error: operation failed due to a previous error during capture"
IMPLICIT = "CUDA error: operation would make the legacy stream depend on a capturing blocking stream"
ISOLATION = "CUDA error: dependency created on uncaptured work in another stream"
UNJOINED = "CUDA error: capturing stream has unjoined work"
CAPTURED_EVENT = "CUDA error: operation not permitted on an event last recorded in a capturing stream"

Pool = tuple[int, int]


@dataclass(eq=False)
class Capture:
    """One that is under way.

    Attributes:
        origin: The stream that it began on, and has to end on.
        mode: ``"global"``, ``"thread_local"`` or ``"relaxed"``.
        streams: Those that belong to it by now.
        unjoined: Those with work that the origin does not wait for yet.
        is_spoiled: Whether it can only fail.
        recording: Where its operations are noted.
    """

    origin: Key
    mode: str
    pool: Pool
    recording: Any
    thread: int = field(default_factory=threading.get_ident)
    streams: set[Key] = field(default_factory=set)
    unjoined: set[Key] = field(default_factory=set)
    is_spoiled: bool = False

    def spoil(self, why: str) -> torch.AcceleratorError:
        """Spoils it; the error to raise."""
        self.is_spoiled = True
        return torch.AcceleratorError(why)


ACTIVE: list[Capture] = []
UNDERWAY: set[Pool] = set()
"""Pools for which the allocator believes that a capture is under way."""


def of_stream(stream: Key) -> Capture | None:
    """The capture that a stream belongs to."""
    return next((capture for capture in ACTIVE if stream in capture.streams), None)


def of_launch(stream: Key) -> Capture | None:
    """The capture that work on a stream goes into.

    Raises:
        torch.AcceleratorError: It is spoiled.
    """
    capture = of_stream(stream)
    if capture is not None and capture.is_spoiled:
        raise torch.AcceleratorError(INVALIDATED)
    if capture is not None and stream != capture.origin:
        capture.unjoined.add(stream)
    return capture


def unsafe_call() -> None:
    """Something that may wait for the device, or asks the driver for memory.

    Raises:
        torch.AcceleratorError: A capture does not permit it, and is spoiled.
    """
    spoiled = [
        capture.spoil(NOT_PERMITTED)
        for capture in ACTIVE
        if capture.mode == "global" or (capture.mode == "thread_local" and capture.thread == threading.get_ident())
    ]
    if spoiled:
        raise spoiled[0]


def wait_for_streams(streams: Iterable[Key]) -> None:
    """The host's waiting for streams, or asking how far they are.

    Raises:
        torch.AcceleratorError: One of them is being captured, or a capture does not permit it.
    """
    for stream in streams:
        capture = of_stream(stream)
        if capture is not None:
            raise capture.spoil(NOT_PERMITTED)
    unsafe_call()


def wait_for_device(device: int) -> None:
    """The host's waiting for all of a device.

    Raises:
        torch.AcceleratorError: A stream of it is being captured, or a capture does not permit it.
    """
    wait_for_streams(stream for capture in list(ACTIVE) for stream in capture.streams if stream[0] == device)


def wait_between(stream: Key, recorded_in: Capture | None, recorded_on: Key | None) -> None:
    """A stream's waiting for an event, which may be what has it belong to a capture.

    Args:
        stream: The stream that waits.
        recorded_in: The capture that the event was recorded in, if it is still under way.
        recorded_on: The stream that the event was recorded on.

    Raises:
        torch.AcceleratorError: The one may not depend on the other.
    """
    capture = of_stream(stream)
    if recorded_in is None:
        # An event that nobody has recorded is no dependency.
        if capture is not None and recorded_on is not None:
            raise capture.spoil(ISOLATION)
        return
    if stream[1] == 0:
        raise recorded_in.spoil(IMPLICIT)
    if capture is None:
        recorded_in.streams.add(stream)
        recorded_in.unjoined.add(stream)
    elif capture is not recorded_in:
        recorded_in.spoil(ISOLATION)
        raise capture.spoil(ISOLATION)
    elif recorded_on is not None and stream == capture.origin:
        recorded_in.unjoined.discard(recorded_on)


def begin(mode: str, pool: Pool, recording: Any) -> Capture:
    """Begins a capture on the current stream.

    Raises:
        RuntimeError: It is the default stream, or the pool is believed to be in use by another capture.
    """
    stream = current_stream()
    if stream[1] == 0:
        raise RuntimeError("CUDA graphs must be captured on a non-default stream.")
    if mode not in ("global", "thread_local", "relaxed"):
        raise RuntimeError(f"Unknown capture error mode. Expected `global`, `thread_local`, or `relaxed`, got {mode}")
    if pool in UNDERWAY:
        raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
    UNDERWAY.add(pool)
    if of_stream(stream) is not None:
        raise torch.AcceleratorError(NOT_PERMITTED)
    capture = Capture(stream, mode, pool, recording, streams={stream})
    ACTIVE.append(capture)
    return capture


def end(capture: Capture) -> None:
    """Ends a capture.

    Raises:
        RuntimeError: Another stream is the current one: the capture goes on.
        torch.AcceleratorError: It was spoiled, or streams were not waited for.
    """
    if current_stream() != capture.origin:
        raise RuntimeError("Capture must end on the same stream it began on.")
    if capture in ACTIVE:
        ACTIVE.remove(capture)
    if capture.is_spoiled:
        raise torch.AcceleratorError(INVALIDATED)
    if capture.unjoined:
        raise torch.AcceleratorError(UNJOINED)
    UNDERWAY.discard(capture.pool)


def forget_all() -> list[Capture]:
    """Ends whatever is under way, as the end of a process would; what was."""
    left = list(ACTIVE)
    ACTIVE.clear()
    UNDERWAY.clear()
    return left


def is_capturing(*_: Any) -> bool:
    """Whether the calling thread's current stream is being captured."""
    return of_stream(current_stream()) is not None
