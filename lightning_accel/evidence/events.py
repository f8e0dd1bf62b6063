"""What happens in a run, as typed events: a record is a file of them, a line of JSON each, by ``record.schema.json``.

A line has the event's ``kind`` beside its fields.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from types import UnionType
from typing import Any, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from lightning_accel.core.measured import finite
from lightning_accel.core.states import SiteChanged
from lightning_accel.evidence.epoch_speed import EpochSpeed
from lightning_accel.evidence.served import Served
from lightning_accel.evidence.step_breakdown import Anatomy, MemoryPeaked
from lightning_accel.tuning.comparison import Result

T = TypeVar("T")

FORMAT = 1
MOST_PIECES = 32
MOST_OF_CARD = 4
"""Pieces of what a card says, which changes slowly: every quarter of a minute."""


@dataclass(frozen=True, kw_only=True)
class RunStarted:
    """What ran, where."""

    format: int = FORMAT
    started: str  # in UTC, by ISO 8601
    command: list[str]  # of the process
    model: str  # the module's class, with its package
    parameters: int | None  # how many elements it trains or has frozen; None: not known before the first batch
    settings: dict[str, Any] | None  # of the plan; None: a run without the plugin
    precision: str  # as Lightning calls it
    strategy: str  # the class of it
    machine: str  # as `Host.described`
    cores: int  # that the process may use
    world_size: int  # how many ranks trained together
    versions: dict[str, str]  # of Python and of packages, by name
    threads: int = 0  # that torch computes with; on a GPU the one that tells it what to do. 0: not known
    native_bf16: bool = False  # whether the device computes in bfloat16, faster than in float32
    device_bytes: int = 0  # all the memory of the device, on a CPU of the machine or container
    log_every_n_steps: int = 0  # the Trainer's
    accumulate_grad_batches: int = 1  # the Trainer's
    # Of training batches: what each was made with, by the names of `DataLoader`.
    loaders: list[dict[str, Any]] = field(default_factory=list)
    # Where the code comes from that is neither Python's nor installed; of folders within each other the outermost.
    source_folders: list[str] = field(default_factory=list)
    makes_loaders: bool = True  # whether the user's own code makes them, or a library's
    has_images: bool = True  # whether there are images in a batch


class Piece(NamedTuple):
    """Steps that follow each other."""

    first: int  # number of the first one, about
    steps: int  # how many they are
    ms: float  # of a step, in their mean
    samples: float | None  # the same; None: not known


@dataclass(frozen=True, kw_only=True)
class StepMeasured:
    """Some steps, one after the other."""

    first: int  # number of the first one, from 1 where training began, in whichever run; validation is none
    last: int  # number of the last one
    timed: int  # how many of them were: not those that were slowed by being measured
    # Means over consecutive pieces of equal length: from the end of a step to the end of the next, waiting for data
    # included.
    cycle_ms: list[float]
    wait_ms: list[float]  # of the same pieces, what of it was waiting for data
    samples: int | None  # in those that were timed; None: not known
    losses: list[tuple[int, float]]  # of some steps: their numbers, and what `training_step` returned
    looked_at: int = 0  # of how many steps the parts are
    # What these steps' time went to, in their sum; it adds up to all of it.
    parts_ms: dict[str, float] = field(default_factory=dict)
    # Memory that was held at the end of each of these: of torch's allocator on a GPU, else of the process.
    held_mib: list[float] = field(default_factory=list)
    captured: int = 0  # how many graphs `torch.compile` has captured
    compiling_ms: float = 0.0  # what it took for that
    # Processor time of the training's own thread while it waited for data, in the sum of steps that were looked at:
    # what loading without workers takes.
    loading_cpu_ms: float = 0.0
    # What NVML said of the first rank's card, by the names of `GpuStats`, and `throttled_frac`: means over consecutive
    # pieces; empty without it.
    card: dict[str, list[float]] = field(default_factory=dict)
    # What of waiting for data it took to load samples, one by one, before a loader without workers made a batch of
    # them; in the same sum. 0: not known.
    samples_ms: float = 0.0
    capturing: int = 0  # in how many of the steps that were timed torch.compile has captured a graph
    capturing_ms: float = 0.0  # what these took together, all of them

    def pieces(self) -> Iterator[Piece]:
        length = piece_length(self.timed)
        steps_each = (self.last - self.first + 1) / max(1, self.timed)
        samples_each = None if self.samples is None else self.samples / max(1, self.timed)
        for index, ms in enumerate(self.cycle_ms):
            begin = index * length
            yield Piece(self.first + round(begin * steps_each), min(length, self.timed - begin), ms, samples_each)


@dataclass(frozen=True, kw_only=True)
class EpochEnded(EpochSpeed):
    """What :class:`~lightning_accel.callbacks.SpeedMemoryLogger` logs of an epoch."""

    reserved_mib: float | None = None  # the most that torch's allocator has taken from a GPU; None on a CPU


@dataclass(frozen=True, kw_only=True)
class TrialDecided(Result):
    """What a live trial has come to, in this run or in an earlier one whose plan this one has begun with."""

    setup_s: float | None = None  # seconds that it took before it could be had; None if nothing to speak of


@dataclass(frozen=True, kw_only=True)
class PlanHeld:
    """What all live trials together have come to by now."""

    choices: dict[str, str] = field(default_factory=dict)  # what holds: arm → choice
    whole: Result | None = None  # the latest comparison of all that holds with plain
    is_settled: bool = False  # whether nothing more is to be decided
    step: int | None = None  # after which they had settled in this run; None if they have not


@dataclass(frozen=True, kw_only=True)
class RunEnded:
    """How a run ended, and what the plugin did."""

    status: str  # `"finished"`, `"interrupted"`, or the error
    # As `Report.to_dict`, without what stands in events of sites and trials; None without the plugin.
    report: Mapping[str, Any] | None = None
    page: str = ""  # what a run that died for want of memory ended with
    cards: Mapping[str, float] = field(default_factory=dict)  # what NVML said of the cards over the run


Decision = TrialDecided | SiteChanged | PlanHeld
Event = RunStarted | StepMeasured | EpochEnded | Anatomy | MemoryPeaked | RunEnded | Served | Decision

KINDS: dict[str, type[Event]] = {
    "run": RunStarted,
    "steps": StepMeasured,
    "trial": TrialDecided,
    "site": SiteChanged,
    "plan": PlanHeld,
    "epoch": EpochEnded,
    "anatomy": Anatomy,
    "memory": MemoryPeaked,
    "end": RunEnded,
    "served": Served,
}


def line_of(event: Event) -> str:
    """An event as a line, without its end."""
    kind = next(kind for kind, one in KINDS.items() if isinstance(event, one))
    return json.dumps({"kind": kind, **finite(asdict(event), str)}, default=str)


def event_of(line: Mapping[str, Any]) -> Event | None:
    """The event that a line is of, whose fields of later versions are passed over; None if it is of no known kind.

    Raises:
        AttributeError, KeyError, TypeError, ValueError: It is damaged.
    """
    kind = KINDS.get(str(line.get("kind")))
    return None if kind is None else _built(kind, line)


_types_of = functools.cache(get_type_hints)


def _built(kind: Any, value: Any) -> Any:
    """A plain value as what the type of its field says."""
    origin, of = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        types = _types_of(kind)  # type: ignore[arg-type]
        return kind(**{name: _built(types[name], one) for name, one in value.items() if name in types})  # type: ignore[operator]
    if origin in (Union, UnionType):
        return None if value is None else _built(of[0], value)
    if origin is dict:
        return {key: _built(of[1], one) for key, one in value.items()}
    if origin is list:
        return [_built(of[0], one) for one in value]
    if origin is tuple:
        kinds = of[:1] * len(value) if of[-1] is ... else of
        return tuple(_built(one, part) for one, part in zip(kinds, value, strict=True))
    if kind is int and not isinstance(value, int):
        raise ValueError(f"{value!r} is no whole number")
    return float(value) if kind is float else value


def in_pieces(values: Sequence[float], most: int = MOST_PIECES) -> list[float]:
    """Means over consecutive pieces of equal length."""
    return [round(math.fsum(piece) / len(piece), 4) for piece in pieces_of(values, most)]


def pieces_of(values: Sequence[T], most: int) -> list[Sequence[T]]:
    """Consecutive pieces of equal length; the last one may be shorter."""
    length = piece_length(len(values), most)
    return [values[begin : begin + length] for begin in range(0, len(values), length)]


def piece_length(count: int, most: int = MOST_PIECES) -> int:
    """How many of so many values are in a piece, where there may be so many pieces."""
    return max(1, -(-count // most))
