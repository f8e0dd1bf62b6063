"""The record of one training: a file of JSON lines that grows while it runs, and is read whatever became of the run.

A line is written whole, at most once a minute and at the end of an epoch, so that a process that is killed loses a
minute of it. Each is one of :mod:`~lightning_accel.evidence.events`. A day of training is about one MiB; of thousands
of epochs not every one is written. ``lightning-accel deploy`` adds the forms that it compared.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_accel.core.states import SiteChanged, SiteState
from lightning_accel.evidence.events import EpochEnded, Event, PlanHeld, RunStarted, StepMeasured, TrialDecided, line_of
from lightning_accel.evidence.served import Served
from lightning_accel.evidence.step_breakdown import Anatomy, MemoryPeaked

FOLDER = "accel"
"""In the folder that a logger has for the run."""

RECORD_VARIABLE = "LIGHTNING_ACCEL_RECORD"
"""Of the environment: another folder for records, with any logger or none."""

_ALL_EPOCHS = 1000  # are written; of those after, ever fewer


@dataclass(frozen=True, kw_only=True)
class Record:
    """What was read."""

    path: Path  # from where
    header: RunStarted  # what ran
    steps: list[StepMeasured] = field(default_factory=list)  # all of them, in their order
    epochs: list[dict[str, Any]] = field(default_factory=list)  # what was logged for each, by the names of `EpochSpeed`
    # How it ended: `"finished"`, `"interrupted"`, or the error; empty: nobody knows, as it was killed or still runs.
    status: str = ""
    report: Mapping[str, Any] | None = None  # as of `RunEnded`; None without the plugin, and without an end
    trials: dict[str, TrialDecided] = field(default_factory=dict)  # by name, the latest of each
    sites: dict[tuple[str, str], SiteChanged] = field(default_factory=dict)  # by technique and site, the last of each
    held: PlanHeld = field(default_factory=PlanHeld)  # what live trials had come to at last
    passed_over: list[Path] = field(default_factory=list)  # newer ones in the same folder, which have no steps
    page: str = ""  # what a run that died for want of memory ended with; else empty
    anatomy: Anatomy | None = None  # the step that was taken apart last; None: none was
    memory: MemoryPeaked | None = None  # of the same step
    # What NVML said of the cards over the run: name → value; empty without GpuStats.
    cards: Mapping[str, float] = field(default_factory=dict)
    # The forms in which its model was measured for serving, the latest time; None: it was not.
    served: Served | None = None

    def reasons(self, technique: str, state: SiteState) -> dict[str, str]:
        """The sites of a technique in this state, each with its reason."""
        changes = [one for (name, _), one in self.sites.items() if name == technique]
        return {one.site: one.reason for one in changes if one.after == state}

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
        return mean_parts_ms(late or [some for some in self.steps if some.looked_at])

    @property
    def peak_memory_mib(self) -> float | None:
        """The largest of an epoch; None where none was completed."""
        peaks = [epoch["peak_memory_mib"] for epoch in self.epochs]
        return max((float(peak) for peak in peaks if peak is not None), default=None)

    @property
    def peak_memory_source(self) -> str:
        """Whose peak that is; empty where no epoch was completed."""
        return str(self.epochs[-1].get("peak_memory_source", "")) if self.epochs else ""


def mean_parts_ms(steps: Sequence[StepMeasured]) -> dict[str, float]:
    """What a step's time goes to, in the mean of the steps that were looked at; empty if none was."""
    looked_at = sum(some.looked_at for some in steps)
    total: defaultdict[str, float] = defaultdict(float)
    for some in steps:
        for part, ms in some.parts_ms.items():
            total[part] += ms
    return {part: ms / looked_at for part, ms in total.items()}


def append(path: Path, *events: Event) -> None:
    """Adds events to a record, in one write.

    Raises:
        OSError: It cannot be written.
    """
    with path.open("a", encoding="utf-8") as file:  # each time: nothing stays open in a process that forks
        file.write("".join(f"{line_of(event)}\n" for event in events))


class RecordWriter:
    """Writes a record, line by line, into a new file, whose folder is made.

    Raises:
        OSError: It cannot be written; by every method.
    """

    def __init__(self, path: Path, header: RunStarted) -> None:
        self.path = path
        self._epochs = 0
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(exist_ok=False)
        self.write(header)

    def write(self, *events: Event) -> None:
        """Adds events; of epochs ever fewer are written in a run of thousands."""
        append(self.path, *(event for event in events if not isinstance(event, EpochEnded) or self._is_kept()))

    def _is_kept(self) -> bool:
        """Whether the next epoch is."""
        number, self._epochs = self._epochs, self._epochs + 1
        return number % (1 << (number // _ALL_EPOCHS).bit_length()) == 0
