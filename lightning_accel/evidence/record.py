"""The record of one training: a file of JSON lines that grows while it runs, and is read whatever became of the run.

A line is written whole, at most once a minute and at the end of an epoch, so that a process that is killed loses a
minute of it. The first one (``"kind": "run"``) says what ran where; ``"steps"`` have times and losses of steps since
the line before, ``"epoch"`` what :class:`~lightning_accel.callbacks.SpeedMemoryLogger` logs, and ``"end"`` how it ended
and what the plugin did. A day of training is about one MiB; of thousands of epochs not every one is written.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

FORMAT = 1
FOLDER = "accel"
"""In the folder that a logger has for the run."""

RECORD_VARIABLE = "LIGHTNING_ACCEL_RECORD"
"""Of the environment: another folder for records, with any logger or none."""

MOST_PIECES = 32
_ALL_EPOCHS = 1000  # are written; of those after, ever fewer


class RecordError(ValueError):
    """There is no record to be read. It says where it was looked for, what is there, and what to do."""


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
        world_size: How many ranks trained together.
        versions: Of Python and of packages, by name.
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
    source_folders: list[str] = field(default_factory=list)


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
    """

    path: Path
    header: Header
    steps: list[Steps] = field(default_factory=list)
    epochs: list[dict[str, Any]] = field(default_factory=list)
    status: str = ""
    report: dict[str, Any] | None = None

    @property
    def num_steps(self) -> int:
        return self.steps[-1].last - self.steps[0].first + 1 if self.steps else 0

    @property
    def losses(self) -> dict[int, float]:
        """Step → its loss, of those that were kept."""
        return dict(pair for some in self.steps for pair in some.losses)

    @property
    def parts_ms(self) -> dict[str, float]:
        """What a step's time goes to, in the mean of those that were looked at; empty where none was."""
        looked_at = sum(some.looked_at for some in self.steps)
        total: defaultdict[str, float] = defaultdict(float)
        for some in self.steps:
            for part, ms in some.parts_ms.items():
                total[part] += ms
        return {part: ms / looked_at for part, ms in total.items()}

    @property
    def peak_memory_mib(self) -> float | None:
        """The largest of an epoch; None where none was completed."""
        return max((float(epoch["peak_memory_mib"]) for epoch in self.epochs), default=None)


class RecordWriter:
    """Writes a record, line by line.

    Args:
        path: To where; the folder is made, and the file with the first line.
        header: What runs.

    Raises:
        OSError: It cannot be written; by every method.
    """

    def __init__(self, path: Path, header: Header) -> None:
        self.path = path
        self._epochs = 0
        path.parent.mkdir(parents=True, exist_ok=True)
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

    def end(self, status: str, report: Mapping[str, Any] | None) -> None:
        """Says how it ended."""
        self._append("end", {"status": status, "report": report})

    def _append(self, kind: str, values: Mapping[str, Any]) -> None:
        # Opened anew for each line: nothing stays open in a process that forks, and a line is one write.
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"kind": kind, **_plain(values)}, default=str) + "\n")


def in_pieces(values: Sequence[float], most: int = MOST_PIECES) -> list[float]:
    """Means over consecutive pieces of equal length; what is left over at the end is in the last one."""
    length = max(1, len(values) // most)
    count = len(values) // length
    bounds = [index * length for index in range(count)] + [len(values)]
    return [math.fsum(values[a:b]) / (b - a) for a, b in itertools.pairwise(bounds)]


def read_record(where: Path) -> Record:
    """The record in a file, or the latest one below the folder of a run.

    Raises:
        RecordError: There is none, or none that can be read.
    """
    path = _found(where)
    lines = _lines(path)
    first = next(lines, None)
    if first is None:
        raise RecordError(f"{path} is empty: the run ended before its first line was written.")
    if first.get("kind") != "run":
        raise RecordError(f"{path} does not begin as the record of a run: give one that lightning-accel has written.")
    if first.get("format") != FORMAT:
        raise RecordError(
            f"{path} is written in format {first.get('format')!r}, of another version of lightning-accel; this one"
            f" reads format {FORMAT}. Read it with that version, or run the training again."
        )
    names = Header.__dataclass_fields__
    try:
        header = Header(**{name: first[name] for name in names})
        steps, epochs, status, report = [], [], "", None
        for line in lines:
            kind = line.pop("kind", None)
            if kind == "steps":
                losses = [(int(step), float(loss)) for step, loss in line.pop("losses")]
                steps.append(Steps(losses=losses, **line))
            elif kind == "epoch":
                epochs.append(line)
            elif kind == "end":
                status, report = line["status"], line["report"]
    except (KeyError, TypeError, ValueError) as error:
        raise RecordError(f"{path} is damaged: {type(error).__name__}: {error}. Run the training again.") from error
    return Record(path=path, header=header, steps=steps, epochs=epochs, status=status, report=report)


def _found(where: Path) -> Path:
    if where.is_file():
        return where
    if not where.exists():
        raise RecordError(f"{where} does not exist: give the folder of a run, as its logger made it, or a file in it.")
    found = sorted(where.glob(f"**/{FOLDER}/*.jsonl"), key=lambda path: (path.stat().st_mtime, path.name))
    if not found:
        raise RecordError(
            f"{where} holds no run ({FOLDER}/*.jsonl): train with AccelPlugin() or SpeedMemoryLogger() and"
            " TensorBoardLogger or CSVLogger, and give the folder that these write to."
        )
    return found[-1]


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Those that are whole: the last one of a process that was killed may not be."""
    text = path.read_text(encoding="utf-8", errors="replace").split("\n")
    for number, line in enumerate(text):
        if not line:
            continue
        try:
            found = json.loads(line)
        except ValueError as error:
            if number == len(text) - 1:
                return
            raise RecordError(f"{path} is damaged in line {number + 1}: {error}. Run the training again.") from error
        if not isinstance(found, dict):
            raise RecordError(f"{path} is damaged in line {number + 1}: it is no object of JSON.")
        yield found


def _plain(value: Any) -> Any:
    """As JSON has it, which knows no infinity and no NaN: they are text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value
