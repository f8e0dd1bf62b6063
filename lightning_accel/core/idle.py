"""How long a device waits for its host in the midst of work, which no event in its stream can tell.

An event is passed when all before it is done *and* the host has recorded it: between two of them a device that is
busy throughout looks like one that gets a short kernel now and then. So a step now and then begins with the device
held back until the host is ahead. Then the device never waits, and takes over each part what its work takes. What the
same part takes longer in other steps, it waits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from typing_extensions import override

from lightning_accel.core.clocks import StepClock
from lightning_accel.core.phase_timer import PartTimer


class HeldTimer(PartTimer):
    """Times the parts of steps in which the device is held back, from the first of some parts on.

    Args:
        clock: Whose marks are used.
        rest: The name of what lies in no part; holding the device is in it.
        parts: Of which the host is to be ahead.
        hold: Has the device do nothing for so many milliseconds, when it comes to it.

    Attributes:
        hold_ms: For how long, the next time; as long as the host takes over a step.
    """

    def __init__(self, clock: StepClock, rest: str, parts: Collection[str], hold: Callable[[float], object]) -> None:
        super().__init__(clock, rest)
        self.hold_ms = 0.0
        self._parts, self._hold = parts, hold
        self._is_held = False

    @override
    def begin(self) -> None:
        self._is_held = False
        super().begin()

    @override
    def enter(self, part: str) -> None:
        if self.is_on and not self._is_held and part in self._parts:
            self._is_held = True
            self._hold(self.hold_ms)
        super().enter(part)


def idle_ms(seen: PartTimer, held: PartTimer, parts: Collection[str]) -> dict[str, float]:
    """Of each of some parts, milliseconds that the device waited for its host, at the least.

    It is at the least, as a device that was held back may wait all the same: where the host asks it for a result in
    the midst of a step, and where a step has more operations than fit into its queue.

    ``held`` is of steps in which the device was held back; a part that it has not seen is not spoken of.
    """
    found = {}
    for part in parts:
        if held.steps_with[part] and seen.steps_with[part]:
            busy_ms = held.ms[part] / held.steps_with[part] * seen.steps_with[part]
            found[part] = min(max(0.0, seen.ms[part] - busy_ms), seen.abreast_ms[part])
    return found
