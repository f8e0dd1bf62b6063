"""How long a device waits for its host in the midst of work, which no event in its stream can tell.

An event is passed when all before it is done *and* the host has recorded it: between two of them a device that is
busy throughout looks like one that gets a short kernel now and then. So a step now and then begins with the device
held back until the host is ahead. Then the device never waits, and takes over each part what its work takes. What the
same part takes longer in other steps, it waits.
"""

from __future__ import annotations

from collections.abc import Collection

from lightning_accel.core.step_timeline import PhaseSums


def idle_ms(seen: PhaseSums, held: PhaseSums, phases: Collection[str]) -> dict[str, float]:
    """Of each of some phases, milliseconds that the device waited for its host, at the least.

    It is at the least, as a device that was held back may wait all the same: where the host asks it for a result in
    the midst of a step, and where a step has more operations than fit into its queue.

    ``held`` is of steps in which the device was held back; a phase that it has not seen is not spoken of.
    """
    found = {}
    for phase in phases:
        if held.steps_with[phase] and seen.steps_with[phase]:
            busy_ms = held.ms[phase] / held.steps_with[phase] * seen.steps_with[phase]
            found[phase] = min(max(0.0, seen.ms[phase] - busy_ms), seen.abreast_ms[phase])
    return found
