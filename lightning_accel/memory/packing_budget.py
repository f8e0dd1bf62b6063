"""What is known about the places where a training step saves tensors, and which of them are worth their time."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from lightning_accel.core.byte_size import format_bytes
from lightning_accel.core.clocks import Span

MAX_TIME_SHARE = 0.1
"""Packing and unpacking may add this share to the time that a step takes without them."""

TRIALS = 3
"""How often a place is packed and timed before it has its verdict; the median counts."""

DENSE = "dense"
SLOW = "not worth the time"


@dataclass(eq=False, slots=True)
class SavePlace:
    """One save of a training step.

    A storage is freed when all that is saved of it is packed, or not at all. So the first place of the step whose
    tensor lies in it leads, and the leader's reason holds for its followers.
    """

    word: int | None = None  # the one value beside zero that was found there, as a bit pattern
    reason: str = ""  # why its tensor is left alone; empty: it is packed
    leader: SavePlace | None = None  # if that is another one
    is_decided: bool = False  # whether its trials are over
    before_bytes: int = 0  # of the storage; counted at the leader
    after_bytes: int = 0  # of the packed tensor
    overflows: int = 0  # how often a tensor turned out to be denser than its place promised
    sightings: list[list[Span]] = field(default_factory=list)  # what packing and unpacking took, for every trial

    @property
    def head(self) -> SavePlace:
        return self.leader or self

    @property
    def is_packed(self) -> bool:
        return not (self.reason or self.head.reason)

    def seconds(self) -> float:
        """What packing and unpacking take in a step; 0 without a trial."""
        trials = [sum(span.seconds() for span in sighting) for sighting in self.sightings]
        return statistics.median(trials) if trials else 0.0


@dataclass(frozen=True, kw_only=True)
class PackingReport:
    """What packing does to one training step, as last seen."""

    before_bytes: int  # of the storages that are packed and freed
    after_bytes: int  # of what is kept instead
    packed: int  # how many storages that is
    left_alone: Mapping[str, int]  # why others are not packed → how many

    def __str__(self) -> str:
        count = sum(self.left_alone.values())
        reasons = ", ".join(f"{number} {reason}" for reason, number in self.left_alone.items())
        rest = f"{count} left alone ({reasons})" if count else "none left alone"
        if not self.packed:
            return f"nothing to pack: {rest}" if count else "nothing to pack: no large tensor is saved"
        before, after = format_bytes(self.before_bytes), format_bytes(self.after_bytes)
        tensors = "1 tensor" if self.packed == 1 else f"{self.packed} tensors"
        return f"{before} of saved tensors kept in {after}: {tensors} packed, {rest}"


def choose(places: Iterable[SavePlace], step_seconds: float, max_time_share: float) -> None:
    """Decides which places go on being packed: those that free the most bytes a second, while there is time.

    That is ``max_time_share`` of what a step takes without packing. Places that have not had their trials take their
    time and stay undecided.
    """
    groups: dict[SavePlace, list[SavePlace]] = {}
    for place in places:
        groups.setdefault(place.head, []).append(place)
    seconds = {head: sum(place.seconds() for place in group) for head, group in groups.items()}
    freed = {head: head.before_bytes - sum(place.after_bytes for place in group) for head, group in groups.items()}
    left = max_time_share * max(0.0, step_seconds - sum(seconds.values()))
    for head in sorted(groups, key=lambda head: freed[head] / max(seconds[head], 1e-9), reverse=True):
        is_tried = all(place.is_decided or len(place.sightings) >= TRIALS for place in groups[head])
        if is_tried and (freed[head] <= 0 or seconds[head] > left):
            head.reason = SLOW if freed[head] > 0 else DENSE
        else:
            left -= seconds[head]
        for place in groups[head]:
            place.is_decided |= is_tried
