"""What makes a run larger than it has to be: logits, and what is kept step after step."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator

from lightning_accel.core.byte_size import format_bytes
from lightning_accel.evidence import step_breakdown as categories
from lightning_accel.evidence.finding import Finding, Seen

_LOGITS_LEFT = 0.15  # of the memory of logits, with losses in pieces: docs/results/linear_cross_entropy
_LEAST_LEAK_MIB = 16.0


def logits(seen: Seen) -> Iterator[Finding]:
    memory = seen.record.memory
    if memory is None or seen.record.reasons("loss", "ON"):
        return
    size = memory.parts.get(categories.LOGITS, 0)
    if size > 0.2 * memory.peak_bytes:
        yield Finding(
            name="logits",
            says=f"{size / memory.peak_bytes:.0%} of a step's peak are logits and what their loss keeps",
            action="compute head and loss a few tokens at a time",
            python='AccelPlugin(techniques={"loss": "on"})',
            yaml='accel:\n  techniques: {loss: "on"}',
            speedup=1.0,
            freed_bytes=round((1 - _LOGITS_LEFT) * size),
            basis="logits of all tokens are then never there",
        )


def leak(seen: Seen) -> Iterator[Finding]:
    held = [mib for some in seen.record.steps for mib in some.held_mib]
    late = held[len(held) // 3 :]
    if len(late) < 6:
        return
    steps_each = seen.record.num_steps / len(held)
    growing = sum(b > a for a, b in itertools.pairwise(late)) / (len(late) - 1)
    growth = late[-1] - late[0]
    if growing < 0.6 or growth < max(_LEAST_LEAK_MIB, 0.02 * late[0]):
        return
    slope = statistics.linear_regression([steps_each * place for place in range(len(late))], late).slope
    total = seen.record.header.device_bytes
    grown = (late[-1] - held[0]) * len(held) / (len(held) - 1)
    more = (total / 2**20 - late[-1]) / slope
    until = f"; {format_bytes(total)} are full after {more:,.0f} more" if total else ""
    yield Finding(
        name="leak",
        says=f"memory grows by {slope:.3g} MiB a step{until}",
        action="keep numbers, not tensors: `loss.item()` or `.detach()` in what callbacks and modules collect; empty"
        " their lists at an epoch's end",
        speedup=1.0,
        # What is kept goes into gaps first, so that memory may begin to grow later than the leak.
        freed_bytes=round(min(slope * seen.record.num_steps, grown) * 2**20),
        basis="all of the run's steps have added as much as those past its first third, but no more than memory has"
        " grown",
    )
