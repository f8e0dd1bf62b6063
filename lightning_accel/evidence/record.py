"""The record of one training: a file of JSON lines that grows while it runs, and is read whatever became of the run.

A line is written whole, at most once a minute and at the end of an epoch, so that a process that is killed loses a
minute of it. The first one (``"kind": "run"``) says what ran where; ``"steps"`` have times and losses of steps since
the line before, ``"epoch"`` what :class:`~lightning_accel.callbacks.SpeedMemoryLogger` logs, ``"anatomy"`` one step
taken apart, ``"settled"`` where live trials had, and ``"end"`` how it ended and what the plugin did. A day of training
is about one MiB; of thousands of epochs not every one is written. ``lightning-accel deploy`` adds ``"served"``.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lightning_accel.core.measured import finite
from lightning_accel.evidence.served import Served
from lightning_accel.evidence.step_breakdown import Anatomy

FORMAT = 1
FOLDER = "accel"
"""In the folder that a logger has for the run."""

RECORD_VARIABLE = "LIGHTNING_ACCEL_RECORD"
"""Of the environment: another folder for records, with any logger or none."""

MOST_PIECES = 32
MOST_OF_CARD = 4
"""Pieces of what a card says, which changes slowly: every quarter of a minute."""

_ALL_EPOCHS = 1000  # are written; of those after, ever fewer


@dataclass(frozen=True, kw_only=True)
class Header:
    """What ran, where."""

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
    native_bf16: bool = False  # whether the device computes in bfloat16 rather than emulates it
    device_bytes: int = 0  # all the memory of the device, on a CPU of the machine or container
    log_every_n_steps: int = 0  # the Trainer's
    accumulate_grad_batches: int = 1  # the Trainer's
    # Of training batches: what each was made with, by the names of `DataLoader`.
    loaders: list[dict[str, Any]] = field(default_factory=list)
    # Where the code comes from that is neither Python's nor installed; of folders within each other the outermost.
    source_folders: list[str] = field(default_factory=list)
    makes_loaders: bool = True  # whether the user's own code makes them, or a library's
    has_images: bool = True  # whether there are images in a batch


@dataclass(frozen=True, kw_only=True)
class Steps:
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

    def pieces(self) -> Iterator[tuple[int, int, float]]:
        """Of each piece: the number of its first step, about; how many it has; their mean milliseconds."""
        length = piece_length(self.timed)
        steps_each = (self.last - self.first + 1) / max(1, self.timed)
        for index, ms in enumerate(self.cycle_ms):
            begin = index * length
            yield self.first + round(begin * steps_each), min(length, self.timed - begin), ms


@dataclass(frozen=True, kw_only=True)
class Record:
    """What was read."""

    path: Path  # from where
    header: Header  # what ran
    steps: list[Steps] = field(default_factory=list)  # all of them, in their order
    epochs: list[dict[str, Any]] = field(default_factory=list)  # what was logged for each, by the names of `EpochSpeed`
    # How it ended: `"finished"`, `"interrupted"`, or the error; empty: nobody knows, as it was killed or still runs.
    status: str = ""
    # What the plugin did, as `Report.to_dict`; None without it, and without an end.
    report: dict[str, Any] | None = None
    passed_over: list[Path] = field(default_factory=list)  # newer ones in the same folder, which have no steps
    page: str = ""  # what a run that died for want of memory ended with; else empty
    anatomy: Anatomy | None = None  # the step that was taken apart last; None: none was
    settled_step: int | None = None  # at which live trials had settled; None: they had not, or there were none
    # What NVML said of the cards over the run: name → value; empty without GpuStats.
    cards: dict[str, float] = field(default_factory=dict)
    # The forms in which its model was measured for serving, the latest time; None: it was not.
    served: Served | None = None

    @property
    def num_steps(self) -> int:
        return self.steps[-1].last - self.steps[0].first + 1 if self.steps else 0

    @property
    def losses(self) -> dict[int, float]:
        """Step → its loss, of those that were kept."""
        return dict(pair for some in self.steps for pair in some.losses)

    def parts_ms(self, beginning: float = 0.0) -> dict[str, float]:
        """What a step's time goes to, in the mean of those that were looked at; empty where none was.

        A share of the run's ``beginning`` is left out, if any of them come after it.
        """
        begin = self.steps[0].first + beginning * self.num_steps if self.steps else 0
        late = [some for some in self.steps if some.looked_at and some.first >= begin]
        chosen = late or [some for some in self.steps if some.looked_at]
        return mean_parts_ms(chosen)

    @property
    def peak_memory_mib(self) -> float | None:
        """The largest of an epoch; None where none was completed."""
        peaks = [epoch["peak_memory_mib"] for epoch in self.epochs]
        return max((float(peak) for peak in peaks if peak is not None), default=None)

    @property
    def peak_memory_source(self) -> str:
        """Whose peak that is; empty where no epoch was completed."""
        return str(self.epochs[-1].get("peak_memory_source", "")) if self.epochs else ""


def mean_parts_ms(steps: Sequence[Steps]) -> dict[str, float]:
    """What a step's time goes to, in the mean of the steps that were looked at; empty if none was."""
    looked_at = sum(some.looked_at for some in steps)
    total: defaultdict[str, float] = defaultdict(float)
    for some in steps:
        for part, ms in some.parts_ms.items():
            total[part] += ms
    return {part: ms / looked_at for part, ms in total.items()}


class RecordWriter:
    """Writes a record, line by line, into a new file, whose folder is made.

    Raises:
        OSError: It cannot be written; by every method.
    """

    def __init__(self, path: Path, header: Header) -> None:
        self.path = path
        self._epochs = 0
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(exist_ok=False)
        self._append("run", {"format": FORMAT, **asdict(header)})

    def steps(self, some: Steps) -> None:
        self._append("steps", asdict(some))

    def epoch(self, values: Mapping[str, Any]) -> None:
        """Adds an epoch, of which ever fewer are written in a run of thousands."""
        number, self._epochs = self._epochs, self._epochs + 1
        stride = 1 << max(0, math.floor(math.log2(number / _ALL_EPOCHS)) + 1) if number >= _ALL_EPOCHS else 1
        if number % stride == 0:
            self._append("epoch", values)

    def anatomy(self, anatomy: Anatomy) -> None:
        """Adds a step, taken apart."""
        self._append("anatomy", asdict(anatomy))

    def settled(self, step: int) -> None:
        self._append("settled", {"step": step})

    def end(
        self, status: str, report: Mapping[str, Any] | None, page: str = "", cards: Mapping[str, float] | None = None
    ) -> None:
        """Says how it ended."""
        self._append("end", {"status": status, "report": report, "page": page, "cards": cards or {}})

    def _append(self, kind: str, values: Mapping[str, Any]) -> None:
        # Opened anew for each line: nothing stays open in a process that forks, and a line is one write.
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"kind": kind, **finite(values, str)}, default=str) + "\n")


def in_pieces(values: Sequence[float], most: int = MOST_PIECES) -> list[float]:
    """Means over consecutive pieces of equal length; the last one may be shorter."""
    length = piece_length(len(values), most)
    pieces = (values[begin : begin + length] for begin in range(0, len(values), length))
    return [round(math.fsum(piece) / len(piece), 4) for piece in pieces]


def piece_length(count: int, most: int = MOST_PIECES) -> int:
    """How many of so many values are in a piece, where there may be so many pieces."""
    return max(1, -(-count // most))
