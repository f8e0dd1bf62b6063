"""What a diagnosis finds, and what every finder asks of a record."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lightning_accel.evidence import phase_names
from lightning_accel.evidence.events import StepMeasured
from lightning_accel.evidence.record import Record
from lightning_accel.evidence.speed import BEGINNING

if TYPE_CHECKING:
    from lightning_accel.evidence.peaks import Peaks

WORTH = 0.05
"""Of a step: what takes less is not spoken of."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something to be mended."""

    name: str  # by which another run's is told to be the same
    says: str  # what was found, with its figures
    action: str  # what to do, in a line
    python: str = ""  # what to write; empty: there is no one line
    yaml: str = ""  # the same in a configuration of Lightning's command line; empty: none
    speedup: float | None = None  # how many times as fast the run is predicted to be then; None: that cannot be told
    freed_bytes: int = 0  # what the peak is predicted to lose
    basis: str = ""  # what the prediction rests on


@dataclass(frozen=True, kw_only=True)
class Seen:
    """A record, with what every finder asks for."""

    record: Record  # of a run
    peaks: Peaks | None  # of its machine; None: not known
    parts_ms: dict[str, float] = field(default_factory=dict)  # of the mean step that was looked at, past the beginning
    step_ms: float = 0.0  # their sum
    typical_ms: float = 0.0  # the median step, past the beginning
    waited: float = 0.0  # the share of all steps past the beginning that was waiting for data

    @classmethod
    def of(cls, record: Record, peaks: Peaks | None) -> Seen:
        """Whatever there is of it."""
        parts_ms = record.parts_ms(BEGINNING)
        steps_ms = _past_beginning([piece.ms for some in record.steps for piece in some.pieces()])
        waits_ms = _past_beginning([ms for some in record.steps for ms in some.wait_ms])
        return cls(
            record=record,
            peaks=peaks,
            parts_ms=parts_ms,
            step_ms=sum(parts_ms.values()),
            typical_ms=statistics.median(steps_ms) if steps_ms else 0.0,
            waited=statistics.fmean(waits_ms) / statistics.fmean(steps_ms) if waits_ms and sum(steps_ms) else 0.0,
        )

    def share(self, part: str) -> float:
        """Of a step, that a part takes."""
        return self.parts_ms.get(part, 0.0) / self.step_ms if self.step_ms else 0.0

    def per_look(self, value: Callable[[StepMeasured], float]) -> float:
        """What the steps that were looked at have in their sum, for each of them; 0 where none was."""
        looked_at = sum(some.looked_at for some in self.record.steps)
        return sum(map(value, self.record.steps)) / looked_at if looked_at else 0.0

    @property
    def computing(self) -> float:
        """The share of a step that is forward pass, backward pass and optimizer."""
        return sum(map(self.share, (phase_names.FORWARD, phase_names.BACKWARD, phase_names.OPTIMIZER)))

    def share_of_operations(self, ms: float) -> float:
        """Which share of a typical step some operations take that took ``ms`` in the step that was taken apart.

        That one step may have met a busy moment of the machine: of all that is computed, they take no more than they
        took of all operations.
        """
        anatomy = self.record.anatomy
        if anatomy is None or not anatomy.operations_ms or not self.typical_ms:
            return 0.0
        return min(ms / self.typical_ms, ms / anatomy.operations_ms * self.computing)


def _past_beginning(values: list[float]) -> list[float]:
    return values[len(values) // 5 :]
