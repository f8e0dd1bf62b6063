"""The places where a training step saves tensors, and the choice of those worth packing."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from lightning_accel.core.byte_size import format_bytes
from lightning_accel.core.clocks import Span

MAX_TIME_SHARE = 0.1
"""The largest share by which packing and unpacking may lengthen a step."""

TRIALS = 3
"""How often a place is packed and timed before its verdict. The median counts."""

DENSE = "dense"
SLOW = "not worth the time"


@dataclass(eq=False, slots=True)
class SavePlace:
    """One save of a training step.

    A storage is freed only if every saved part of it is packed. So the first place of the step whose tensor lies in the
    storage leads, and the leader's reason also holds for its followers.
    """

    word: int | None = None  # bit pattern of the only nonzero value found there
    reason: str = ""  # why its tensor is left alone; empty if it is packed
    leader: SavePlace | None = None  # None if it leads itself
    is_decided: bool = False  # whether its trials are over
    before_bytes: int = 0  # of the storage; counted for the leader
    after_bytes: int = 0  # size of the packed tensor
    overflows: int = 0  # how often a tensor was denser than expected
    sightings: list[list[Span]] = field(default_factory=list)  # times of packing and unpacking in each trial

    @property
    def head(self) -> SavePlace:
        return self.leader or self

    @property
    def is_packed(self) -> bool:
        return not (self.reason or self.head.reason)

    def seconds(self) -> float:
        """Returns the seconds of packing and unpacking in a step; 0 without a trial."""
        trials = [sum(span.seconds() for span in sighting) for sighting in self.sightings]
        return statistics.median(trials) if trials else 0.0


@dataclass(frozen=True, kw_only=True)
class PackingReport:
    """The effect of packing on one training step, as last seen."""

    before_bytes: int  # size of the storages that are packed and freed
    after_bytes: int  # size of their replacements
    packed: int  # number of storages
    left_alone: Mapping[str, int]  # reason → number of tensors not packed

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
    """Decides which places stay packed: those that free the most bytes per second, within the time allowed.

    That time is ``max_time_share`` of a step without packing. Places without finished trials use time and stay
    undecided.
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
