"""Runs a program in a folder, each time in a separate process, and reads the records of the runs."""

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
_DATA_HINT = "A checkout holds what git knows. What else both need, such as data, is shared with `--link data`."


class RunError(ValueError):
    """A run failed. The message says how."""


@dataclass(frozen=True, kw_only=True)
class RevisionSide:
    """One of the two compared revisions."""

    letter: str  # `"A"` or `"B"`
    name: str  # which code it is, shown to users
    command: Sequence[str]  # the program
    folder: Path  # its working folder
    environment: Mapping[str, str]  # its environment variables
    elsewhere: Path | None = None  # a folder whose code must not run; None for no restriction
    records: list[Record] = field(default_factory=list)  # records of the runs that count, in order

    def run(self, folder: Path) -> Record:
        """Runs the program once, with its record in a new folder. Shows its output if it fails.

        Raises:
            RunError: The run failed, left no record, or ran code of the other side.
            RecordError: The record cannot be read.
        """
        from lightning_accel.evidence.record import FOLDER, RECORD_VARIABLE
        from lightning_accel.evidence.record_reader import read_record

        folder.mkdir(parents=True)
        environment = {**self.environment, RECORD_VARIABLE: str(folder)}
        with Subprocess(self.command, environment=environment, folder=self.folder) as program:
            if status := program.wait():
                shown = "".join(f"  | {line.rstrip()}\n" for line in program.last_lines(_LAST_LINES))
                raise RunError(
                    f"{self.letter} ({self.name}) ended with status {status}:\n{shown}"
                    + (_DATA_HINT if self.elsewhere is not None else "")
                )
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


def take_turns(a: RevisionSide, b: RevisionSide, runs: int, folder: Path) -> None:
    """Runs both sides in pairs, in random order, after one run of each that fills caches. Prints progress.

    Raises:
        RunError: A run failed.
        RecordError: The record of a run cannot be read.
    """
    schedule, turns = Schedule(), [(a, False), (b, False)]
    for _ in range(runs):
        turns += [(side, True) for side in schedule.order((a, b))]
    for number, (side, counts) in enumerate(turns, start=1):
        first = "" if counts else ", to fill caches"
        turn = f"run {number} of {len(turns)}: {side.letter}, {side.name}{first}"
        print(f"lightning-accel bench: {turn} ... ", end="", file=sys.stderr, flush=True)
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
