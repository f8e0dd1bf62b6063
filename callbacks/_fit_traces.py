"""When a fit's steps are traced, and what is said where they cannot be."""

from __future__ import annotations

import os
import signal
import statistics
from collections import deque
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from lightning_accel.callbacks._announcements import Announcements
from lightning_accel.callbacks._fit_timeline import timeline_of
from lightning_accel.callbacks._recording import Recording
from lightning_accel.callbacks._reporting import folder_of
from lightning_accel.core.profilers import is_profiling
from lightning_accel.core.ranks import rank_zero_info
from lightning_accel.core.report import one_line
from lightning_accel.core.step_timeline import Driver, StepTimeline, StepTimes
from lightning_accel.evidence.amounts import duration
from lightning_accel.evidence.record import FOLDER
from lightning_accel.lightning.packages import PyTorchProfiler, Trainer

_FIRST = 20  # of a schedule that names none: changes have been tried by then, and caches are warm
_ANOTHER = (
    "another profiler is at work, Trainer(profiler='pytorch') say, and there can be one at a time: TraceCallback traces"
    " nothing beside it."
)
_SLOW = 3.0  # times the median
_FEWEST = 16  # steps have a median: the first ones, in which caches fill and changes are tried, are long anyway
_WINDOW = 64
_SIGNAL: signal.Signals | None = getattr(signal, "SIGUSR2", None)  # not on Windows


class FitTraces:
    """The traces of one fit on this rank. They never fail a run: what cannot be traced is said.

    All ranks make theirs together. The settings are those of :class:`~lightning_accel.callbacks.TraceCallback`;
    ``files`` gets what is written.
    """

    def __init__(self, trainer: Trainer, steps: int | Sequence[int], on: str, at_most: int, files: list[Path]) -> None:
        self._trainer, self._at_most, self._files = trainer, at_most, files
        self._notes = Announcements(trainer)
        self._stamp = f"{datetime.now(timezone.utc):%Y%m%dT%H%M%S%f}-{os.getpid()}"
        self._recording: Recording | None = None
        self._times = 0
        self._is_asked = False
        self._before: Any = None  # the handler of the signal that ours has replaced
        self._slow = SlowSteps(timeline_of(trainer)) if on == "slow" else None
        self._left = 0  # steps to trace, where their numbers are not known before
        self._length = steps if isinstance(steps, int) else 0
        self._numbers: Sequence[int] = []
        self._why = "these steps were asked for"
        if on == "schedule":
            first = self._number() + _FIRST
            self._numbers = range(first, first + steps) if isinstance(steps, int) else [*steps]
        # By rank 0: a logger of another rank may count another version.
        self._folder: Path | None = trainer.strategy.broadcast(_folder(trainer))
        self._is_on = self._folder is not None
        if not self._is_on:
            self._notes.say(
                f"TraceCallback writes to local folders, and default_root_dir is {trainer.default_root_dir!r}: no step"
                " is traced. Give Trainer(default_root_dir=...) a local one, or a logger with a local folder."
            )
        elif isinstance(trainer.profiler, PyTorchProfiler):  # type: ignore[attr-defined]
            self._is_on = False  # it begins and ends in the midst of steps
            self._notes.say(_ANOTHER)
        elif on == "signal":
            self._listen()

    # -- steps ---------------------------------------------------------------------------------------------------

    def step_begins(self) -> None:
        """Told when a step has its batch."""
        if self._slow is not None:
            self._slow.step_begins(self._number())
        if self._recording is None and self._is_due(self._number()):
            self._begin(self._number())

    def step_ended(self) -> None:
        """Told at the end of each step, where the next one begins, with its data."""
        number = self._number()
        if self._recording is None:
            self._look(number)
            # The first step of an epoch comes after much else.
            if self._is_due(number + 1) and not self._trainer.is_last_batch:
                self._begin(number + 1)
            return
        self._left -= 1
        goes_on = self._is_due(number + 1)
        self._recording.step_ended(number, goes_on=goes_on)
        if not goes_on:
            self._finish()

    def pause(self) -> None:
        """Told of what takes its time between two steps."""
        if self._slow is not None:
            self._slow.pause()

    def interrupt(self) -> None:
        """Told before what would fill a trace and is no training."""
        self.pause()
        if self._recording is not None:
            self._finish(is_worth_keeping=bool(self._recording.steps))

    def ends(self) -> None:
        """Told when the fit has come to its end."""
        self.interrupt()
        if self._is_on and self._numbers and not self._times:
            self._notes.say(
                f"no step was traced: of TraceCallback's steps ({min(self._numbers)} to {max(self._numbers)}) none was"
                f" among those of this fit, which ended after step {self._number()}."
                " Name steps that it has: TraceCallback(steps=range(5, 8))."
            )

    def close(self) -> None:
        """Ends it all, and leaves everything as it was; also in the middle of a step that has raised."""
        if self._recording is not None:
            self._finish()
        if self._slow is not None:
            self._slow.close()
        if self._before is not None and _SIGNAL is not None:
            if signal.getsignal(_SIGNAL) == self._receive:
                signal.signal(_SIGNAL, self._before)
            self._before = None

    def _number(self) -> int:
        """Of the step under way, or of the one that has just ended, from 1 where training began."""
        return self._trainer.fit_loop.epoch_loop.total_batch_idx + 1

    def _is_due(self, number: int) -> bool:
        return self._is_on and (number in self._numbers or self._left > 0)

    def _look(self, number: int) -> None:
        """Decides whether the steps that come are to be traced."""
        if self._slow is not None and (found := self._slow.step_ended()) and self._times < self._at_most:
            self._why, self._left = found, self._length
        if self._is_asked:
            self._is_asked = False
            self._why, self._left = "a signal came", self._length

    # -- a recording ---------------------------------------------------------------------------------------------

    def _begin(self, number: int) -> None:
        try:
            if is_profiling():
                self._left = 0
                self._notes.say(_ANOTHER)
                return
            self._recording = Recording(self._trainer, number, self._why, self._finish, self._lose)
        except Exception as error:  # whatever it is: the run is worth more than its trace
            self._give_up(error)

    def _finish(self, *, is_worth_keeping: bool = True) -> None:
        recording, self._recording = self._recording, None
        if recording is None or self._folder is None:
            return
        self.pause()
        try:
            recording.stop()
            if not is_worth_keeping:
                return
            written = recording.write(self._folder, self._stamp)
        except Exception as error:
            self._give_up(error)
            return
        if recording.without_tracks:
            self._notes.say(f"a trace has no tracks for steps, phases and techniques: {recording.without_tracks}")
        self._times += 1
        self._files += written
        rank_zero_info(f"lightning-accel: traced, as {self._why}: {', '.join(map(str, written))}")

    def _lose(self) -> None:
        recording, self._recording = self._recording, None
        if recording is None:
            return
        recording.stop(is_lost=True)
        self._left = 0
        self._notes.say("another profiler began while TraceCallback's was at work, whose trace is lost.")

    def _give_up(self, error: Exception) -> None:
        self._is_on = False
        self._notes.say(f"steps could not be traced: {one_line(error)}. The run goes on, and nothing more is traced.")

    # -- a signal ------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        if _SIGNAL is None:
            self._notes.say("this system has no SIGUSR2: TraceCallback(on='signal') traces nothing. Use on='slow'.")
            return
        before = signal.getsignal(_SIGNAL)
        if before not in (signal.SIG_DFL, signal.SIG_IGN):  # Lightning's, of a job that SLURM requeues by it, say
            self._notes.say("SIGUSR2 has a handler already, which stays: TraceCallback(on='signal') traces nothing.")
            return
        try:
            signal.signal(_SIGNAL, self._receive)
        except ValueError:
            self._notes.say(
                "only the main thread gets signals, and this is another: TraceCallback(on='signal') traces nothing."
            )
            return
        self._before = before
        rank_zero_info(f"lightning-accel: to trace {self._length} steps, kill -USR2 {os.getpid()}")

    def _receive(self, number: int, frame: Any) -> None:
        self._is_asked = True


class SlowSteps:
    """Compares each step, from the end of the one before to its own, with the median of those before it.

    On a GPU it is the device's time, which is known some steps later.
    """

    def __init__(self, timeline: StepTimeline) -> None:
        self._timeline = timeline
        timeline.listeners.append(self._took)
        timeline.is_watched = True
        self._ms: deque[float] = deque(maxlen=_WINDOW)
        self._found: str | None = None
        self._was_paused = True

    def close(self) -> None:
        """Listens no more."""
        self._timeline.is_watched = False
        self._timeline.forget(self._took)
        self._timeline.release(self)

    def pause(self) -> None:
        """Tells that something else than training comes next: the step in which it ends is not looked at."""
        self._timeline.pause()
        self._was_paused = True

    def step_begins(self, number: int) -> None:
        """Told before each step."""
        if not self._was_paused:
            self._timeline.labels[self] = number

    def step_ended(self) -> str | None:
        """Told after each step. Returns in words what was slow, or None if nothing was."""
        self._was_paused = False
        if self._timeline.claim(self, Driver.TRACES):
            self._timeline.steps_ended(1)
        found, self._found = self._found, None
        return found

    def _took(self, step: StepTimes) -> None:
        ms, number = step.cycle_ms, step.labels.get(self)
        if number is None:
            return
        if len(self._ms) >= _FEWEST and ms > _SLOW * (median := statistics.median(self._ms)):
            self._found = f"step {number} took {duration(ms)}, the median is {duration(median)}"
        self._ms.append(ms)


def _folder(trainer: Trainer) -> Path | None:
    """The run's own, or the one for all runs; None where it is not on this machine."""
    own = next(filter(None, map(folder_of, trainer.loggers)), None)
    if own is None and "://" not in trainer.default_root_dir:
        own = Path(trainer.default_root_dir)
    return None if own is None else own / FOLDER
