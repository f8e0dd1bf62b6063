"""What keeps a run from being faster or smaller, what to do about it, and what that is predicted to bring.

Each finder is a function of a record; a prediction is arithmetic on what was measured, after Amdahl ("Validity of the
Single Processor Approach", 1967, https://doi.org/10.1145/1465482.1465560): what is not touched takes what it took.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from lightning_accel.evidence import compute_findings as in_steps
from lightning_accel.evidence import overhead_findings as around
from lightning_accel.evidence.finding import Finding, Seen
from lightning_accel.evidence.record import Record

if TYPE_CHECKING:
    from lightning_accel.evidence.peaks import Peaks

__all__ = ["Finding", "diagnose"]

_FINDERS: tuple[Callable[[Seen], Iterator[Finding]], ...] = (
    around.loader,
    around.logging,
    around.callbacks,
    around.recompiling,
    in_steps.precision,
    in_steps.tiny_batches,
    in_steps.layouts,
    in_steps.waits,
    in_steps.logits,
    in_steps.leak,
)


def diagnose(record: Record, peaks: Peaks | None = None) -> list[Finding]:
    """All findings, the most promising first; without peaks no gain of another dtype is predicted."""
    seen = Seen.of(record, peaks)
    found = [finding for find in _FINDERS for finding in find(seen)]
    return sorted(found, key=lambda one: (-(one.speedup or 1.0), -one.freed_bytes))
