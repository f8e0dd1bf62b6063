"""Keeps the record of a fit in the folder of its first logger, for those who compare runs or ask what became of one."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.nn.parameter import is_lazy

from lightning_accel.callbacks._epoch import EpochSpeed
from lightning_accel.callbacks._parts import StepParts
from lightning_accel.core.clocks import Tally
from lightning_accel.core.host import Host, usable_cores
from lightning_accel.core.report import Report
from lightning_accel.core.trial import one_line
from lightning_accel.evidence.record import FOLDER, MOST_PIECES, Header, RecordWriter, Steps, in_pieces
from lightning_accel.settings import Plan

EVERY_S = 60.0
_PACKAGES = ("torch", "lightning", "pytorch-lightning", "lightning-accel")


class FitRecord:
    """The record of one fit on rank 0; other ranks have none. It never fails a run: what cannot be written is said.

    Args:
        trainer: In its fit.
        folder: The record's.
        parts: Of the steps that are looked at.

    Attributes:
        knows_samples: Whether every batch has told how many samples it holds.
    """

    def __init__(self, trainer: Trainer, folder: Path, parts: StepParts) -> None:
        self.knows_samples = True
        self._trainer, self._folder, self._parts = trainer, folder, parts
        self._started = datetime.now(timezone.utc)
        self._writer: RecordWriter | None = None  # until there is something to write
        self._has_failed = False
        self._due = time.monotonic() + EVERY_S
        # Since training began, in whichever run: losses are compared at equal steps.
        self._steps = self._written = trainer.fit_loop.epoch_loop.total_batch_idx + 1
        self._cycle_ms: list[float] = []
        self._wait_ms: list[float] = []
        self._samples = 0
        self._losses: list[tuple[int, Tensor]] = []
        self._stride = 1
        self._tally = Tally()  # the clock's latest
        self._taken = self._taken_samples = 0  # of it

    @classmethod
    def open(cls, trainer: Trainer, parts: StepParts) -> FitRecord | None:
        """For the fit that begins, on rank 0, where a logger has a folder of this run's on this machine."""
        if not trainer.is_global_zero or trainer.fast_dev_run or trainer.barebones:  # type: ignore[attr-defined]
            return None
        folder = next(filter(None, map(folder_of, trainer.loggers)), None)
        return None if folder is None else cls(trainer, folder / FOLDER, parts)

    def step_ended(self, tally: Tally, outputs: Any) -> None:
        """Told after each step.

        Args:
            tally: The clock's, of this epoch.
            outputs: What Lightning says that ``training_step`` returned.
        """
        self._steps += 1
        if self._steps % self._stride == 0:
            loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
            if type(loss) is Tensor and loss.numel() == 1:  # a DTensor's value may be a collective call
                self._losses.append((self._steps, loss.detach()))
                if len(self._losses) > MOST_PIECES:
                    self._stride *= 2
                    self._losses = [one for one in self._losses if one[0] % self._stride == 0]
        if time.monotonic() >= self._due:
            self._take(tally)
            self._write()

    def epoch_ended(self, tally: Tally, speed: EpochSpeed) -> None:
        """Told at an epoch's end, before the clock begins anew."""
        self._take(tally)
        self._write()
        self._attempt(lambda writer: writer.epoch(asdict(speed)))

    def end(self, tally: Tally, exception: BaseException | None) -> None:
        """Says how the fit ended; once."""
        if exception is not None:  # a device that has failed raises at every question
            self._losses = [one for one in self._losses if one[1].device.type == "cpu"]
        self._take(tally)
        if isinstance(exception, KeyboardInterrupt):
            status = "interrupted"
        else:
            status = "finished" if exception is None else one_line(exception)
        report = getattr(self._trainer.precision_plugin, "report", None)
        self._write()
        self._attempt(lambda writer: writer.end(status, report.to_dict() if isinstance(report, Report) else None))
        self._has_failed = True  # nothing more is written

    def _take(self, tally: Tally) -> None:
        """Takes over from the clock what it has timed since it was last asked."""
        if tally is not self._tally:
            self._tally, self._taken, self._taken_samples = tally, 0, 0
        self._cycle_ms += tally.cycle_ms[self._taken :]
        self._wait_ms += tally.each_wait_ms[self._taken :]
        self._samples += tally.samples - self._taken_samples
        self._taken, self._taken_samples = len(tally.cycle_ms), tally.samples

    def _write(self) -> None:
        self._due = time.monotonic() + EVERY_S
        if self._steps == self._written or self._has_failed:
            return
        parts_ms, looked_at = self._parts.taken()
        some = Steps(
            first=self._written + 1,
            last=self._steps,
            timed=len(self._cycle_ms),
            cycle_ms=in_pieces(self._cycle_ms),
            wait_ms=in_pieces(self._wait_ms),
            samples=self._samples if self.knows_samples else None,
            losses=[(step, float(loss)) for step, loss in self._losses],
            looked_at=looked_at,
            parts_ms=parts_ms,
        )
        self._written, self._samples = self._steps, 0
        self._cycle_ms, self._wait_ms, self._losses = [], [], []
        self._attempt(lambda writer: writer.steps(some))

    def _attempt(self, write: Any) -> None:
        if self._has_failed:
            return
        try:
            if self._writer is None:
                name = f"{self._started:%Y%m%dT%H%M%S}-{os.getpid()}.jsonl"
                self._writer = RecordWriter(self._folder / name, header_of(self._trainer, self._started))
            write(self._writer)
        except Exception as error:  # whatever it is: the run is worth more than its record
            self._has_failed = True
            line = f"this run's record could not be written: {one_line(error)}. The run goes on without one."
            rank_zero_info(f"lightning-accel: {line}")
            report = getattr(self._trainer.precision_plugin, "report", None)
            if isinstance(report, Report):
                report.note(line)


def folder_of(logger: Any) -> Path | None:
    """As TensorBoard's and CSV's have; others have one for all runs, or none."""
    try:
        folder = getattr(logger, "log_dir", None)
    except Exception:  # somebody else's property: no reason to end the run
        return None
    return Path(folder) if isinstance(folder, str) and "://" not in folder else None


def header_of(trainer: Trainer, started: datetime) -> Header:
    """What a Trainer runs, and where."""
    module = trainer.lightning_module
    plan = getattr(trainer.precision_plugin, "plan", None)
    parameters = list(module.parameters())
    return Header(
        started=started.isoformat(timespec="seconds"),
        command=list(sys.argv),
        model=f"{type(module).__module__}.{type(module).__qualname__}",
        parameters=None if any(map(is_lazy, parameters)) else sum(one.numel() for one in parameters),
        settings=plan.to_dict() if isinstance(plan, Plan) else None,
        precision=str(trainer.precision),
        strategy=type(trainer.strategy).__name__,
        machine=Host.detect(trainer.strategy.root_device).described,
        cores=usable_cores(),
        world_size=trainer.world_size,
        versions={"python": platform.python_version(), **_installed()},
    )


def _installed() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found
