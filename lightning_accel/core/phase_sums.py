"""Sums the phases of steps, and estimates how long a device was idle in them."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection
from typing import Any, NamedTuple

from lightning_accel.core.clocks import HostClock


class Switch(NamedTuple):
    """A change from one phase to another."""

    phase: str  # the one that begins
    mark: Any
    is_abreast: bool  # whether the device had reached the previous instant when the host reached this one


class PhaseSums:
    """Adds up the phases of steps.

    Attributes:
        ms: Phase → milliseconds in all steps.
        abreast_ms: The part of ``ms`` in intervals whose start the device had reached before the host reached their
            end. In all other intervals the device was behind and did not wait for the host. On a CPU this is all of
            ``ms``.
        steps_with: Phase → how many steps had it.
        steps: The number of steps.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.ms: defaultdict[str, float] = defaultdict(float)
        self.abreast_ms: defaultdict[str, float] = defaultdict(float)
        self.steps_with: defaultdict[str, int] = defaultdict(int)
        self.steps = 0

    def add(self, clock: HostClock, switches: list[Switch]) -> None:
        """Adds the phases of one step. Each phase lasts until the next."""
        for began, ended in itertools.pairwise(switches):
            took_ms = clock.ms_between(began.mark, ended.mark)
            self.ms[began.phase] += took_ms
            self.abreast_ms[began.phase] += took_ms if ended.is_abreast else 0.0
        for phase in {switch.phase for switch in switches}:
            self.steps_with[phase] += 1
        self.steps += 1

    def idle_ms(self, held: PhaseSums, phases: Collection[str]) -> dict[str, float]:
        """Returns for each phase the least time, in milliseconds, that the device waited for the host during work.

        Events do not show this. An event passes when all earlier work is done *and* the host has recorded it, so a busy
        device looks like one that occasionally gets a short kernel. ``held`` has steps that began with the device held
        back until the host was ahead. There the device never waits, and a phase takes as long as its work. Any longer
        time of the same phase in other steps is waiting. The result is a lower bound, because a device that was held
        back may still wait: where the host needs a result, and where its queue is too short for all operations.
        """
        found = {}
        for phase in phases:
            if held.steps_with[phase] and self.steps_with[phase]:
                busy_ms = held.ms[phase] / held.steps_with[phase] * self.steps_with[phase]
                found[phase] = min(max(0.0, self.ms[phase] - busy_ms), self.abreast_ms[phase])
        return found
