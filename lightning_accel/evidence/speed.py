"""How fast a run is: one figure, for console, loggers, pages and those who compare.

It is that of the mean step since live trials had settled, or past the beginning where there were none, in which caches
fill: over all epochs, and without validation and what else is no step of training.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lightning_accel.evidence.amounts import rate
from lightning_accel.evidence.events import Piece, StepMeasured

BEGINNING = 0.2
"""Of a run's steps, which are left out."""

FEWEST = 3
"""Timed steps, of which a speed is told."""


@dataclass(frozen=True)
class Speed:
    """Of a run."""

    per_second: float  # samples of all ranks, or where these are not known steps, which ranks take together
    unit: str  # `"samples"` or `"steps"`

    def __str__(self) -> str:
        return f"{rate(self.per_second)} {self.unit}/s"


def speed_of(steps: Sequence[StepMeasured], settled_step: int | None, world_size: int) -> Speed | None:
    """How fast they were; None: they are too few to tell.

    ``settled_step``: at which live trials had settled; None: they had not, or there were none.
    """
    pieces = late(steps, settled_step)
    if sum(piece.steps for piece in pieces) < FEWEST:
        return None
    return per_second(pieces, world_size, by_sample=know_samples(steps))


def per_second(pieces: Sequence[Piece], world_size: int, *, by_sample: bool) -> Speed:
    """The rate of pieces, of which there are some."""
    per_rank = 1e3 / mean_ms(pieces, by_sample=by_sample)
    return Speed(world_size * per_rank, "samples") if by_sample else Speed(per_rank, "steps")


def know_samples(steps: Iterable[StepMeasured]) -> bool:
    """Whether it is known how many samples all of them had, so that they can be told by the sample."""
    return all(some.samples for some in steps if some.timed)


def late(steps: Sequence[StepMeasured], settled_step: int | None) -> list[Piece]:
    """The pieces of a run that count."""
    pieces = [piece for some in steps for piece in some.pieces()]
    if settled_step is not None:
        settled = [piece for piece in pieces if piece.first > settled_step]
        if sum(piece.steps for piece in settled) >= FEWEST:
            return settled
    if not pieces:
        return []
    begin = steps[0].first + BEGINNING * (steps[-1].last - steps[0].first + 1)
    return [piece for piece in pieces if piece.first >= begin] or pieces[-1:]


def mean_ms(pieces: Iterable[Piece], *, by_sample: bool) -> float:
    """Milliseconds of a step, or of a sample."""
    pieces = list(pieces)
    units = sum(piece.steps * ((piece.samples or 0.0) if by_sample else 1.0) for piece in pieces)
    return sum(piece.steps * piece.ms for piece in pieces) / units
