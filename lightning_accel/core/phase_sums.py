"""Of what the time of steps consists: their phases, added up, and how long a device was idle in them."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection
from typing import Any, NamedTuple

from lightning_accel.core.clocks import HostClock


class Switch(NamedTuple):
    """From one phase to another."""

    phase: str  # that begins
    mark: Any
    is_abreast: bool  # whether the device had come to the instant before this one when the host came to this one


class PhaseSums:
    """Adds up the phases of steps.

    Attributes:
        ms: Phase → milliseconds in all steps.
        abreast_ms: Of these, what lay between two instants the first of which the device had come to before the host
            came to the second: in all else the device was behind, and did not wait for the host. On a CPU it is all.
        steps_with: Phase → in how many steps it was.
        steps: How many steps there were.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.ms: defaultdict[str, float] = defaultdict(float)
        self.abreast_ms: defaultdict[str, float] = defaultdict(float)
        self.steps_with: defaultdict[str, int] = defaultdict(int)
        self.steps = 0

    def add(self, clock: HostClock, switches: list[Switch]) -> None:
        """Adds the phases of one step, of which each lasts until the next."""
        for began, ended in itertools.pairwise(switches):
            took_ms = clock.ms_between(began.mark, ended.mark)
            self.ms[began.phase] += took_ms
            self.abreast_ms[began.phase] += took_ms if ended.is_abreast else 0.0
        for phase in {switch.phase for switch in switches}:
            self.steps_with[phase] += 1
        self.steps += 1

    def idle_ms(self, held: PhaseSums, phases: Collection[str]) -> dict[str, float]:
        """Of some phases, the milliseconds that the device waited for its host in the midst of work, at the least.

        No event tells that: one is passed when all before it is done *and* the host has recorded it, so a device that
        is busy throughout looks like one that gets a short kernel now and then. In a step that begins with the device
        held back until the host is ahead, the device never waits, and a phase takes what its work takes. What the same
        phase takes longer in other steps, the device waits. It is at the least, as a device that was held back may
        wait all the same: where the host asks it for a result, and where operations are more than fit into its queue.
        """
        found = {}
        for phase in phases:
            if held.steps_with[phase] and self.steps_with[phase]:
                busy_ms = held.ms[phase] / held.steps_with[phase] * self.steps_with[phase]
                found[phase] = min(max(0.0, self.ms[phase] - busy_ms), self.abreast_ms[phase])
        return found
