"""Of what a step's time consists: parts that add up to all of it, whatever lies within what.

Time counts for the part that was entered last and is not left: an optimizer's step that calls forward and backward has
what is left without them. So a step's parts add up to its time from the first mark to the last, on whichever timeline.
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from typing import Any, NamedTuple

from lightning_accel.core.clocks import StepClock


class PartTimer:
    """Times the parts of some steps, by a clock's own marks; on a GPU these are events, read once it has passed them.

    Attributes:
        ms: Part → milliseconds in all steps that were read.
        abreast_ms: Of these, what lay between two marks the first of which the device had come to before the host came
            to the second: in all else the device was behind, and did not wait for the host. On a CPU it is all.
        steps_with: Part → in how many of the steps it was.
        steps: How many these are.
        is_on: Whether a step is being timed.
    """

    def __init__(self, clock: StepClock, rest: str) -> None:
        self.clear()
        self.is_on = False
        self._clock, self._rest = clock, rest
        self._stack: list[str] = []
        self._switches: list[_Switch] = []
        self._pending: deque[list[_Switch]] = deque()  # of steps that are over

    @property
    def part(self) -> str:
        """That which a step under way is in; empty: none is."""
        return self._stack[-1] if self._stack else ""

    def begin(self) -> None:
        """Begins a step, with the rest."""
        self.is_on = True
        self._stack = [self._rest]
        self._switches = []
        self._switch(self._rest)

    def enter(self, part: str) -> None:
        """Begins a part; without effect where no step is timed."""
        if self._stack:
            self._stack.append(part)
            self._switch(part)

    def leave(self) -> None:
        """Ends the part that was entered last."""
        if len(self._stack) > 1:
            self._stack.pop()
            self._switch(self._stack[-1])

    def end(self) -> None:
        if self._stack:
            self._switch("")
            self._pending.append(self._switches)
            self.drop()

    def drop(self) -> None:
        """Forgets the step under way, in which something else went on."""
        self.is_on = False
        self._stack, self._switches = [], []

    def drop_pending(self) -> None:
        """Forgets all that was not read: the device is not to be asked any more."""
        self.drop()
        self._pending.clear()

    def read(self) -> None:
        """Adds up the steps that the device has passed; it is not waited for."""
        while self._pending and self._clock.has_passed(self._pending[0][-1].mark):
            switches = self._pending.popleft()
            for began, ended in itertools.pairwise(switches):
                took_ms = self._clock.ms_between(began.mark, ended.mark)
                self.ms[began.part] += took_ms
                self.abreast_ms[began.part] += took_ms if ended.is_abreast else 0.0
            for part in {switch.part for switch in switches}:
                self.steps_with[part] += 1
            self.steps += 1

    def clear(self) -> None:
        """Begins to count anew."""
        self.ms: defaultdict[str, float] = defaultdict(float)
        self.abreast_ms: defaultdict[str, float] = defaultdict(float)
        self.steps_with: defaultdict[str, int] = defaultdict(int)
        self.steps = 0

    def _switch(self, part: str) -> None:
        is_abreast = bool(self._switches) and self._clock.has_passed(self._switches[-1].mark)
        self._switches.append(_Switch(part, self._clock.mark(), is_abreast))


class _Switch(NamedTuple):
    part: str  # that begins
    mark: Any
    is_abreast: bool  # whether the device had come to the mark before this one when the host came to this one
