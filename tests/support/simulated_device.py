"""A device that is simulated: its timeline is exact, and it counts how often somebody waits for it."""

from __future__ import annotations

from typing import Any


class SimulatedDevice:
    """A queue that works behind the host's back, in milliseconds.

    Attributes:
        host_ms: The host's time.
        free_at_ms: When all that was launched will be done.
        synchronisations: How often the host has waited for an event.
        events: How many were made.
    """

    def __init__(self) -> None:
        self.host_ms = 0.0
        self.free_at_ms = 0.0
        self.synchronisations = 0
        self.events = 0

    def launch(self, work_ms: float) -> None:
        self.free_at_ms = max(self.host_ms, self.free_at_ms) + work_ms

    def new_event(self) -> SimulatedEvent:
        self.events += 1
        return SimulatedEvent(self)


class SimulatedEvent:
    """As a :class:`torch.cuda.Event` that keeps its time."""

    def __init__(self, device: SimulatedDevice) -> None:
        self.device = device
        self.at_ms = 0.0

    def record(self, stream: Any = None) -> None:
        self.device.launch(0.0)
        self.at_ms = self.device.free_at_ms

    def query(self) -> bool:
        return self.at_ms <= self.device.host_ms

    def synchronize(self) -> None:
        self.device.synchronisations += 1
        self.device.host_ms = max(self.device.host_ms, self.at_ms)

    def elapsed_time(self, end: SimulatedEvent) -> float:
        assert self.query(), "not reached yet: CUDA raises here"
        assert end.query(), "not reached yet: CUDA raises here"
        return end.at_ms - self.at_ms
