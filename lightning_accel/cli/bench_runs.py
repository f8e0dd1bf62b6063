"""Runs of a program in a folder, each in a process of its own, and the records that they leave."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_accel.core.clocks import Stopwatch
from lightning_accel.experiment.pair_schedule import Schedule
from lightning_accel.experiment.subprocess_runner import Subprocess

if TYPE_CHECKING:
    from lightning_accel.evidence.record import Record

_LAST_LINES = 20


class RunError(ValueError):
    """A run that has come to nothing. It says how."""


@dataclass(frozen=True, kw_only=True)
class RevisionSide:
    """One of the two that are compared."""

    letter: str  # `"A"` or `"B"`
    name: str  # which code it is, for people
    command: Sequence[str]  # what is run
    folder: Path  # where
    environment: Mapping[str, str]  # with which variables
    elsewhere: Path | None = None  # a folder none of whose code may run; None: whatever runs
    records: list[Record] = field(default_factory=list)  # what the runs have left that count, in their order

    def run(self, folder: Path) -> Record:
        """Runs it once, with its record in a new folder; its output is shown where it fails.

        Raises:
            RunError: It failed, left no record, or ran code of the other side.
            RecordError: What it left cannot be read.
        """
        from lightning_accel.evidence.record import FOLDER, RECORD_VARIABLE
        from lightning_accel.evidence.record_reader import read_record

        folder.mkdir(parents=True)
        environment = {**self.environment, RECORD_VARIABLE: str(folder)}
        with Subprocess(self.command, environment=environment, folder=self.folder) as program:
            if status := program.wait():
                shown = "".join(f"  | {line.rstrip()}\n" for line in program.last_lines(_LAST_LINES))
                raise RunError(f"{self.letter} ({self.name}) ended with status {status}:\n{shown}{self._data_hint()}")
        if not list((folder / FOLDER).glob("*.jsonl")):
            raise RunError(
                f"{self.letter} ({self.name}) left no record: its Trainer needs AccelPlugin() in its plugins or"
                " SpeedMemoryLogger() in its callbacks, has to train, and not as a fast_dev_run."
            )
        record = read_record(folder)
        for source in record.header.source_folders:
            if self.elsewhere is not None and Path(source).is_relative_to(self.elsewhere):
                raise RunError(
                    f"{self.letter} ({self.name}) ran code of the working tree, in {source}. Have Python find it by a"
                    " relative path, which leads into either checkout: `PYTHONPATH=src lightning-accel bench ...`, say."
                )
        return record

    def _data_hint(self) -> str:
        if self.elsewhere is None:
            return ""
        return "A checkout holds what git knows. What else both need, such as data, is shared with `--link data`."


def take_turns(a: RevisionSide, b: RevisionSide, runs: int, folder: Path) -> None:
    """Runs both in pairs, in an order by a coin, after one run of each that fills caches. Progress is said.

    Raises:
        RunError: One came to nothing.
        RecordError: What one left cannot be read.
    """
    schedule, turns = Schedule(), [(a, False), (b, False)]
    for _ in range(runs):
        turns += [(side, True) for side in schedule.order((a, b))]
    for number, (side, counts) in enumerate(turns, start=1):
        first = "" if counts else ", to fill caches"
        _say(f"run {number} of {len(turns)}: {side.letter}, {side.name}{first} ... ", end="")
        stopwatch = Stopwatch()
        try:
            record = side.run(folder / f"{number}-{side.letter}")
        except BaseException:
            print(file=sys.stderr)
            raise
        fits = len(list(record.path.parent.glob("*.jsonl")))
        last = f", the last of {fits} fits" if fits > 1 else ""
        print(f"{record.num_steps:,} steps{last}, {stopwatch.seconds():.1f} s", file=sys.stderr, flush=True)
        if counts:
            side.records.append(record)


def _say(text: str, end: str = "\n") -> None:
    print(f"lightning-accel bench: {text}", end=end, file=sys.stderr, flush=True)
