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
from lightning_accel.evidence.anatomy import Anatomy
from lightning_accel.evidence.served import Served

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
    """What ran, where.

    Attributes:
        started: In UTC, by ISO 8601.
        command: Of the process.
        model: The module's class, with its package.
        parameters: How many elements it trains or has frozen; None: not known before the first batch.
        settings: Of the plan; None: a run without the plugin.
        precision: As Lightning calls it.
        strategy: The class of it.
        machine: As :attr:`Host.described <lightning_accel.core.host.Host.described>`.
        cores: That the process may use.
        threads: That torch computes with; on a GPU the one that tells it what to do. 0: not known.
        world_size: How many ranks trained together.
        versions: Of Python and of packages, by name.
        native_bf16: Whether the device computes in bfloat16 rather than emulates it.
        device_bytes: All the memory of the device, on a CPU of the machine or container.
        log_every_n_steps: The Trainer's.
        accumulate_grad_batches: The Trainer's.
        loaders: Of training batches: what each was made with, by the names of :class:`torch.utils.data.DataLoader`.
        makes_loaders: Whether the user's own code makes them, or a library's.
        has_images: Whether there are images in a batch.
        source_folders: Where the code comes from that is neither Python's nor installed; of folders within each other
            the outermost.
    """

    started: str
    command: list[str]
    model: str
    parameters: int | None
    settings: dict[str, Any] | None
    precision: str
    strategy: str
    machine: str
    cores: int
    world_size: int
    versions: dict[str, str]
    threads: int = 0
    native_bf16: bool = False
    device_bytes: int = 0
    log_every_n_steps: int = 0
    accumulate_grad_batches: int = 1
    loaders: list[dict[str, Any]] = field(default_factory=list)
    source_folders: list[str] = field(default_factory=list)
    makes_loaders: bool = True
    has_images: bool = True


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Some steps, one after the other.

    Attributes:
        first: Number of the first one, from 1 where training began, in whichever run; validation is none.
        last: Number of the last one.
        timed: How many of them were: not those that were slowed by being measured.
        cycle_ms: Means over consecutive pieces of equal length: from the end of a step to the end of the next, waiting
            for data included.
        wait_ms: Of the same pieces, what of it was waiting for data.
        samples: In those that were timed; None: not known.
        losses: Of some steps: their numbers, and what ``training_step`` returned.
        looked_at: Of how many steps the parts are.
        parts_ms: What these steps' time went to, in their sum; it adds up to all of it.
        held_mib: Memory that was held at the end of each of these: of torch's allocator on a GPU, else of the process.
        captured: How many graphs ``torch.compile`` has captured.
        compiling_ms: What it took for that.
        loading_cpu_ms: Processor time of the training's own thread while it waited for data, in the sum of steps that
            were looked at: what loading without workers takes.
        card: What NVML said of the first rank's card, by the names of :class:`~lightning_accel.callbacks.GpuStats`, and
            ``throttled_frac``: means over consecutive pieces; empty without it.
        samples_ms: What of waiting for data it took to load samples, one by one, before a loader without workers made
            a batch of them; in the same sum. 0: not known.
        capturing: In how many of the steps that were timed torch.compile has captured a graph.
        capturing_ms: What these took together, all of them.
    """

    first: int
    last: int
    timed: int
    cycle_ms: list[float]
    wait_ms: list[float]
    samples: int | None
    losses: list[tuple[int, float]]
    looked_at: int = 0
    parts_ms: dict[str, float] = field(default_factory=dict)
    held_mib: list[float] = field(default_factory=list)
    captured: int = 0
    compiling_ms: float = 0.0
    loading_cpu_ms: float = 0.0
    card: dict[str, list[float]] = field(default_factory=dict)
    samples_ms: float = 0.0
    capturing: int = 0
    capturing_ms: float = 0.0

    def pieces(self) -> Iterator[tuple[int, int, float]]:
        """Of each piece: the number of its first step, about; how many it has; their mean milliseconds."""
        length = piece_length(self.timed)
        steps_each = (self.last - self.first + 1) / max(1, self.timed)
        for index, ms in enumerate(self.cycle_ms):
            begin = index * length
            yield self.first + round(begin * steps_each), min(length, self.timed - begin), ms


@dataclass(frozen=True, kw_only=True)
class Record:
    """What was read.

    Attributes:
        path: From where.
        header: What ran.
        steps: All of them, in their order.
        epochs: What was logged for each, by the names of :class:`~lightning_accel.callbacks._epoch.EpochSpeed`.
        status: How it ended: ``"finished"``, ``"interrupted"``, or the error; empty: nobody knows, as it was killed or
            still runs.
        report: What the plugin did, as :meth:`Report.to_dict <lightning_accel.core.report.Report.to_dict>`; None
            without it, and without an end.
        passed_over: Newer ones in the same folder, which have no steps.
        page: What a run that died for want of memory ended with; else empty.
        anatomy: The step that was taken apart last; None: none was.
        settled_step: At which live trials had settled; None: they had not, or there were none.
        cards: What NVML said of the cards over the run: name → value; empty without GpuStats.
        served: The forms in which its model was measured for serving, the latest time; None: it was not.
    """

    path: Path
    header: Header
    steps: list[Steps] = field(default_factory=list)
    epochs: list[dict[str, Any]] = field(default_factory=list)
    status: str = ""
    report: dict[str, Any] | None = None
    passed_over: list[Path] = field(default_factory=list)
    page: str = ""
    anatomy: Anatomy | None = None
    settled_step: int | None = None
    cards: dict[str, float] = field(default_factory=dict)
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

        Args:
            beginning: A share of the run that is left out, if any of them come after it.
        """
        begin = self.steps[0].first + beginning * self.num_steps if self.steps else 0
        late = [some for some in self.steps if some.looked_at and some.first >= begin]
        chosen = late or [some for some in self.steps if some.looked_at]
        looked_at = sum(some.looked_at for some in chosen)
        total: defaultdict[str, float] = defaultdict(float)
        for some in chosen:
            for part, ms in some.parts_ms.items():
                total[part] += ms
        return {part: ms / looked_at for part, ms in total.items()}

    @property
    def peak_memory_mib(self) -> float | None:
        """The largest of an epoch; None where none was completed."""
        peaks = [epoch["peak_memory_mib"] for epoch in self.epochs]
        return max((float(peak) for peak in peaks if peak is not None), default=None)

    @property
    def peak_memory_source(self) -> str:
        """Whose peak that is; empty where no epoch was completed."""
        return str(self.epochs[-1].get("peak_memory_source", "")) if self.epochs else ""


class RecordWriter:
    """Writes a record, line by line.

    Args:
        path: To where; the folder is made, and the file with the first line, which must be a new one.
        header: What runs.

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
        """Adds steps."""
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
        """Says that live trials had settled at a step."""
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
