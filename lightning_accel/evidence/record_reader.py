"""Records, read back: whatever became of a run, and whoever has written the file."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_accel.evidence.events import FORMAT, PlanHeld, RunEnded, StepMeasured, event_of, piece_length
from lightning_accel.evidence.record import FOLDER, RECORD_VARIABLE, Record


class RecordError(ValueError):
    """There is no record to be read. It says where it was looked for, what is there, and what to do."""


def read_record(where: Path) -> Record:
    """The record in a file, or the latest one below the folder of a run.

    Raises:
        RecordError: There is none, or none that can be read.
    """
    if where.is_file():
        return _read(where)
    found = _found(where)
    passed_over: list[Path] = []
    for path in found:
        record = _read(path)
        if any(some.cycle_ms for some in record.steps):
            return replace(record, passed_over=passed_over)
        passed_over.append(path)
    return _read(found[0])


def read_earlier(record: Record, most: int = 20) -> list[Record]:
    """The latest records of the same training, from before a run's, in the folders beside its own; oldest first."""
    path = record.path.resolve()
    runs = path.parents[min(2, len(path.parents) - 1)]  # a record that was taken elsewhere may lie in a root
    files = {*runs.glob(f"*/{FOLDER}/*-*.jsonl"), *path.parent.glob("*-*.jsonl")}
    found = []
    for file in sorted((one for one in files if one.name < path.name), key=lambda one: one.name)[-most:]:
        try:
            other = _read(file)
        except (RecordError, OSError):  # somebody else's, or damaged: nothing of this run
            continue
        if (other.header.model, other.header.parameters) == (record.header.model, record.header.parameters):
            found.append(other)
    return found


def _read(path: Path) -> Record:
    lines = list(_lines(path))
    if not lines:
        raise RecordError(f"{path} is empty: the run ended before its first line was written.")
    first = lines[0]
    if first.get("kind") != "run":
        raise RecordError(f"{path} does not begin as the record of a run: give one that lightning-accel has written.")
    if first.get("format") != FORMAT:
        raise RecordError(
            f"{path} is written in format {first.get('format')!r}, of another version of lightning-accel; this one"
            f" reads format {FORMAT}. Read it with that version, or run the training again."
        )
    found: defaultdict[str, list[Any]] = defaultdict(list)
    try:
        for line in lines:
            kind = str(line.get("kind"))
            if (event := event_of(line)) is not None:
                # Epochs are of any version: what is known of one is looked up by its name.
                found[kind].append(line if kind == "epoch" else event)
        steps = [_checked(some) for some in found["steps"]]
        trials = {one.name: one for one in found["trial"]}
        sites = {(one.technique, one.site): one for one in found["site"]}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise RecordError(f"{path} is damaged: {type(error).__name__}: {error}. Run the training again.") from error
    ended = found["end"][-1] if found["end"] else RunEnded(status="")
    return Record(
        path=path,
        header=found["run"][0],
        steps=steps,
        epochs=found["epoch"],
        status=str(ended.status),
        report=ended.report,
        page=str(ended.page),
        anatomy=next(reversed(found["anatomy"]), None),
        memory=next(reversed(found["memory"]), None),
        trials=trials,
        sites=sites,
        held=next(reversed(found["plan"]), PlanHeld()),
        cards=ended.cards,
        served=next(reversed(found["served"]), None),
    )


def _checked(some: StepMeasured) -> StepMeasured:
    """With numbers that can be: who writes by hand, or over a bad disk, is told."""
    times = [*some.cycle_ms, *some.parts_ms.values()]
    if min(some.first, some.last, some.timed, some.looked_at, some.samples or 0) < 0:
        raise ValueError(f"steps {some.first!r} to {some.last!r} are not counted in whole numbers")
    if not all(0 <= ms < math.inf for ms in times) or 0 in some.cycle_ms:
        raise ValueError(f"the times of steps {some.first} to {some.last} are no milliseconds")
    if len(some.cycle_ms) != -(-some.timed // piece_length(some.timed)) or (some.parts_ms and not some.looked_at):
        raise ValueError(f"the times of steps {some.first} to {some.last} are not those of {some.timed} steps")
    return some


def _found(where: Path) -> list[Path]:
    """The records below a folder, the newest first: their names begin with the time."""
    if not where.exists():
        raise RecordError(f"{where} does not exist: give the folder of a run, as its logger made it, or a file in it.")
    found = sorted(where.glob(f"**/{FOLDER}/*-*.jsonl"), key=lambda path: path.name, reverse=True)
    if not found:
        raise RecordError(
            f"{where} holds no run ({FOLDER}/*.jsonl): train with AccelPlugin() or SpeedMemoryLogger() and"
            " TensorBoardLogger or CSVLogger, and give the folder that these write to. AccelPlugin alone keeps none of"
            f" a run of seconds: {RECORD_VARIABLE}=FOLDER in the environment asks for it."
        )
    return found


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Those that are whole: the last one of a process that was killed may not be."""
    text = path.read_text(encoding="utf-8", errors="replace").split("\n")
    for number, line in enumerate(text):
        if not line:
            continue
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as error:
            if number == len(text) - 1 and number > 0:
                return
            raise RecordError(f"{path} is damaged in line {number + 1}: {error}. Run the training again.") from error
        if not isinstance(found, dict):
            raise RecordError(f"{path} is damaged in line {number + 1}: it is no object of JSON.")
        yield found
