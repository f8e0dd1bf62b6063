"""Keeps the record of a fit in a file, by which runs are compared and reports are written.

The file is in the folder of the first logger that has one for the run, or where ``$LIGHTNING_ACCEL_RECORD`` says.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from lightning_accel.callbacks._announcements import Decisions, report_of, say
from lightning_accel.callbacks._header import header_of
from lightning_accel.callbacks._phase_sampler import EVERY, PhaseSampler
from lightning_accel.callbacks._reporting import leave_report, shown_in_notebooks
from lightning_accel.callbacks.gpu_stats import course_of_cards, told_by_cards
from lightning_accel.core.clocks import Deadline
from lightning_accel.core.report import one_line
from lightning_accel.core.step_timeline import StepTally
from lightning_accel.core.torch_private.compilation import compiling_ms, graphs_captured
from lightning_accel.evidence.epoch_speed import EpochSpeed
from lightning_accel.evidence.events import (
    MOST_OF_CARD,
    MOST_PIECES,
    EpochEnded,
    Event,
    RunEnded,
    StepMeasured,
    in_pieces,
)
from lightning_accel.evidence.phase_names import ORDER
from lightning_accel.evidence.record import RecordWriter, mean_parts_ms
from lightning_accel.evidence.speed import Speed, speed_of
from lightning_accel.evidence.step_breakdown import Anatomy, MemoryPeaked
from lightning_accel.lightning.packages import Trainer
from lightning_accel.memory.oom_report import StepMemoryError

EVERY_S = 60.0
_MOST_WAITING = 100  # epochs, for a file that is made later than they ended


class FitRecord:
    """The record of one fit on rank 0, and its file once :meth:`keep_in` was called.

    It never fails a run. If the file cannot be written, a message says so.

    Attributes:
        folder: Where the file is, or is to be; None if there is to be none.
        parts: Samples the phases of steps; None if nobody does.
        knows_samples: Whether the number of samples of every batch is known.
        has_images: Whether there are images in a batch.
        memory: The memory at the peak of the step that was taken apart last; None if no step was.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.parts: PhaseSampler | None = None
        self.knows_samples, self.has_images = True, False
        self.memory: MemoryPeaked | None = None
        self._trainer = trainer
        self.folder: Path | None = None
        self._device = trainer.strategy.root_device
        self._started = datetime.now(timezone.utc)
        self._course: list[StepMeasured] = []
        self._settled_step: int | None = None
        self._in_file = 0  # of these
        self._decisions = Decisions(trainer)
        self._epochs: deque[EpochEnded] = deque(maxlen=_MOST_WAITING)  # that are not in the file
        self._writer: RecordWriter | None = None  # until there is something to write
        self._has_failed = False
        self._due = Deadline(EVERY_S)
        # Since training began, in whichever run: losses are compared at equal steps.
        self._steps = self._written = trainer.fit_loop.epoch_loop.total_batch_idx + 1
        self._is_automatic = trainer.lightning_module.automatic_optimization
        self._losses: list[tuple[int, int, Tensor]] = []  # steps, by what Lightning has divided the loss, and the loss
        self._stride = 1
        self._held_mib: list[float] = []
        self._captured, self._compiling_ms = graphs_captured(), compiling_ms()
        self._captured_before = self._captured  # the latest step
        self._new = StepTally()  # of the steps that are in no line yet
        self._tally = StepTally()  # the latest
        self._taken = 0, 0, 0  # how many steps, captures and samples of it

    def keep_in(self, folder: Path) -> None:
        """Writes the record to a file in this folder from now on, with what it has been told so far."""
        self.folder = None if self._has_failed else folder

    @property
    def speed(self) -> Speed | None:
        """How fast the fit is; None if too few steps were timed."""
        return speed_of(self._course, self._settled_step, self._trainer.world_size)

    @property
    def parts_ms(self) -> dict[str, float]:
        """Phase → milliseconds, in the mean of all steps looked at and in the order of phases; empty if none was."""
        found = mean_parts_ms(self._course)
        return {phase: found[phase] for phase in ORDER if phase in found}

    @property
    def path(self) -> Path | None:
        """The path of the file; None while it is empty, and if it could not be written."""
        return None if self._writer is None else self._writer.path

    def has_captured(self) -> bool:
        """Whether a CUDA graph was captured since this was last asked, at the end of the step before."""
        before, self._captured_before = self._captured_before, graphs_captured()
        return self._captured_before > before

    def step_ended(self, tally: StepTally, outputs: Any) -> None:
        """Told after each step, with the times of the interval's steps and what the step has returned."""
        self._steps += 1
        if self.folder is None:
            return
        self._keep(outputs)
        if self._due.is_over():
            self._take(tally)
            self._write()

    @property
    def until_kept(self) -> int:
        """The number of steps until one of which memory or loss may be kept."""
        return EVERY - self._steps % EVERY

    def passed(self, outputs: Any, steps: int) -> None:
        """Told of several steps at once, with the outputs of the last one."""
        self._steps += steps
        if self.folder is not None:
            self._captured_before = graphs_captured()
            self._keep(outputs)

    def _keep(self, outputs: Any) -> None:
        if self._steps % EVERY == 0:
            is_cuda = self._device.type == "cuda"
            held = torch.cuda.memory_allocated(self._device) if is_cuda else psutil.Process().memory_info().rss
            self._held_mib.append(held / 2**20)
        if self._steps % self._stride == 0:
            loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
            # A DTensor's value may be a collective call; a view would keep what it is a view of.
            if type(loss) is Tensor and loss.numel() == 1:
                # A copy under XLA, made after the end of a step, would be compiled into the next one.
                kept = loss.detach() if loss.device.type == "xla" else loss.detach().clone()
                divided_by = self._trainer.accumulate_grad_batches if self._is_automatic else 1
                self._losses.append((self._steps, divided_by, kept))
                if len(self._losses) > MOST_PIECES:
                    self._stride *= 2
                    self._losses = [one for one in self._losses if one[0] % self._stride == 0]

    def took_apart(self, taken: Callable[[], tuple[Anatomy, MemoryPeaked]]) -> None:
        """Told of a step that was watched, operation by operation."""
        try:
            anatomy, self.memory = taken()
        except Exception as error:  # of tensors of any kind
            say(self._trainer, f"a step could not be taken apart: {one_line(error)}")
            return
        anatomy.step = self.memory.step = self._steps + 1  # which it has not been told the end of
        self._emit(anatomy, self.memory)

    def settled(self, tally: StepTally) -> None:
        """Told where live trials have settled."""
        self._take(tally)
        self._write()  # so that no piece of the run is of steps before and after
        self._settled_step = self._steps
        self._emit()

    def epoch_ended(self, tally: StepTally, speed: EpochSpeed) -> None:
        """Told at an epoch's end, before the clock begins anew."""
        self._take(tally)
        if self._writer is None or self._due.is_over():
            self._write()
        reserved_bytes = torch.cuda.max_memory_reserved(self._device) if self._device.type == "cuda" else None
        reserved_mib = None if reserved_bytes is None else reserved_bytes / 2**20  # a CPU has several allocators
        self._epochs.append(EpochEnded(**vars(speed), reserved_mib=reserved_mib))
        self._emit()

    def training_ended(self, tally: StepTally, exception: BaseException | None = None) -> None:
        """Told when no step is to follow, and what has ended them."""
        if exception is not None and self._device.type != "cpu":  # a device that has failed raises at every question
            self._losses = [one for one in self._losses if one[-1].device.type == "cpu"]
        self._take(tally)
        self._write()

    def end(self, exception: BaseException | None) -> None:
        """Says how the fit ended; once."""
        if self.folder is None:
            return
        if isinstance(exception, KeyboardInterrupt):
            status = "interrupted"
        else:
            status = "finished" if exception is None else one_line(exception)
        page = str(exception) if isinstance(exception, StepMemoryError) else ""
        report = report_of(self._trainer)
        plain = None if report is None else report.to_dict()
        for one in () if plain is None else plain["techniques"].values():
            for name in ("applied", "refused", "data"):  # are in events
                one.pop(name, None)
        self._emit(RunEnded(status=status, report=plain, page=page, cards=told_by_cards(self._trainer)))
        if self._writer is not None and self.folder is not None:
            leave_report(self._trainer, self._writer.path, is_asked_by_memory=bool(page))
            if report is not None:
                report.page = partial(shown_in_notebooks, self._writer.path)
        self.folder, self._has_failed = None, True  # nothing more is written

    def _take(self, tally: StepTally) -> None:
        """Takes over what the tally has been told since this was last called, or all of a new one."""
        steps, captures, samples = self._taken if tally is self._tally else (0, 0, 0)
        self._new.cycle_ms += tally.cycle_ms[steps:]
        self._new.wait_ms += tally.wait_ms[steps:]
        self._new.labelled_ms += tally.labelled_ms[captures:]
        self._new.samples += tally.samples - samples
        self._tally, self._taken = tally, (len(tally.cycle_ms), len(tally.labelled_ms), tally.samples)

    def _write(self) -> None:
        self._due = Deadline(EVERY_S)
        if self._steps > self._written:
            self._emit(takes_steps=True)

    def _some(self) -> StepMeasured:
        new = self._new
        captured, compiling = graphs_captured(), compiling_ms()
        some = StepMeasured(
            first=self._written + 1,
            last=self._steps,
            timed=len(new.cycle_ms),
            cycle_ms=in_pieces(new.cycle_ms),
            wait_ms=in_pieces(new.wait_ms),
            samples=new.samples if self.knows_samples else None,
            losses=[(step, factor * value) for step, factor, loss in self._losses for value in _value_of(loss)],
            held_mib=in_pieces(self._held_mib),
            captured=captured - self._captured,
            compiling_ms=max(0.0, compiling - self._compiling_ms),
            card={name: in_pieces(each, MOST_OF_CARD) for name, each in course_of_cards(self._trainer).items()},
            capturing=len(new.labelled_ms),
            capturing_ms=sum(new.labelled_ms),
            **({} if self.parts is None else self.parts.taken()),
        )
        self._written, self._captured, self._compiling_ms = self._steps, captured, compiling
        self._new, self._losses, self._held_mib = StepTally(), [], []
        return some

    def _emit(self, *events: Event, takes_steps: bool = False) -> None:
        """Writes what it has been told of that is not in the file, and these."""
        try:
            if takes_steps:
                self._course.append(self._some())
            if self.folder is None:
                return
            if self._writer is None:
                path = self.folder / f"{self._started:%Y%m%dT%H%M%S%f}-{os.getpid()}.jsonl"
                header = header_of(self._trainer, self._started, has_images=self.has_images)
                self._writer = RecordWriter(path, header)
            decided = self._decisions.new(self._settled_step)
            self._writer.write(*self._course[self._in_file :], *self._epochs, *decided, *events)
            self._in_file = len(self._course)
            self._epochs.clear()
        except Exception as error:  # whatever it is: the run is worth more than its record
            self.folder, self._has_failed = None, True
            message = f"this run's record could not be written: {one_line(error)}. The run goes on without one."
            say(self._trainer, message)


def _value_of(loss: Tensor) -> list[float]:
    """As a number, where it is one."""
    return [float(loss)] if loss.is_floating_point() and not loss.is_meta else []
