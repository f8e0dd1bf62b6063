"""All that measures during one fit, as far as the run can pay for it."""

from __future__ import annotations

import os
from typing import Any

from lightning_accel.callbacks._allowance import IN_A_ROW, Allowance, Rests
from lightning_accel.callbacks._announcements import advise
from lightning_accel.callbacks._batch_size import SizeReader
from lightning_accel.callbacks._epoch_ends import EpochEnds, gather_at_end
from lightning_accel.callbacks._interval import Interval, put_together
from lightning_accel.callbacks._phase_sampler import PhaseSampler
from lightning_accel.callbacks._record import FitRecord
from lightning_accel.callbacks._reporting import record_folder, report_path
from lightning_accel.callbacks._step_watch import StepWatch, has_settled
from lightning_accel.callbacks._summary_logger import Teller
from lightning_accel.core.clocks import Deadline, seconds
from lightning_accel.core.peak_memory import PeakMemory
from lightning_accel.core.step_timeline import Driver, StepTally, StepTimeline
from lightning_accel.core.tree import leaves
from lightning_accel.data.advice import has_images
from lightning_accel.evidence.epoch_speed import EpochSpeed
from lightning_accel.evidence.record import RECORD_VARIABLE
from lightning_accel.lightning.packages import Trainer
from lightning_accel.lightning.private import FetchPatch

_RECORD_S = 0.02  # a header and its lines
_TEXTS_S = 0.1
_MEMORY_S = 4e-4
_TIMED_STEP_S = 1e-4  # of a step of milliseconds, after which no cache holds anything of ours
_FIGURES_S = 0.5  # most of which is matplotlib's import


class FitInstruments:
    """Everything that measures during one fit.

    A step is timed from the first one on. All else is made where the user has asked for it, or once the run can pay.
    If steps are so short that timing each of them costs too much, some in a row are timed, and then none for a while.

    Args:
        trainer: In its fit.
        batch_size_fn: As of :class:`SpeedMemoryLogger`; likewise ``every_s``.
        rests: Says of which steps it is not to be told.
        is_asked: Whether the user has asked for all of it.

    Attributes:
        steps: How many there were, without those of the rest under way.
        interval: The meters.
        timeline: That of the meters.
        epochs: Those that were not told of.
        ends: Told of every step if there are several ranks; else None.
        teller: Told where the run settles, on rank 0; else None.
        record: Told of every step and epoch, on rank 0; else None.
        watch: Has some steps watched, operation by operation.
    """

    _FIRST_LOOK = 8  # steps, at which it is seen what the run can pay; then ever rarer ones, up to once a second

    def __init__(
        self, trainer: Trainer, batch_size_fn: SizeReader | None, every_s: float, rests: Rests, *, is_asked: bool
    ) -> None:
        began = seconds()
        self._trainer = trainer
        self.steps = self._restarted_at = self._reported = 0
        self._has_advised = False
        self.interval = Interval(trainer, batch_size_fn)
        self.timeline = self.interval.timeline
        self.ends = EpochEnds.open(trainer)
        self.teller = Teller.open(trainer)
        self.record = FitRecord(trainer) if trainer.is_global_zero else None
        self._phases: PhaseSampler | None = None
        is_asked |= report_path(trainer) is not None or RECORD_VARIABLE in os.environ
        self._allowance = Allowance(trainer, is_asked=is_asked)
        self.watch = StepWatch(trainer, self.interval.flops, self._allowance)
        self._rests = rests
        if trainer.world_size == 1 and not is_asked:
            rests.next_at = IN_A_ROW
        self._every_s = every_s if trainer.world_size == 1 else 0.0  # ranks would not agree on what time it is
        self._next_interval = Deadline(self._every_s)
        self.epochs: list[int] = []
        self._look_at, self._is_looking = self._FIRST_LOOK, True
        self._fetch_hooks: FetchPatch | None = None  # until the run can pay for them: what a fetch took is not known
        if is_asked or trainer.world_size > 1:  # of which one may keep the others waiting
            self._hear_of_fetches(self.timeline)
            self.interval.memory = PeakMemory(self._trainer.strategy.root_device)
        if is_asked:
            self.watch.next_at, self._is_looking = 0, False
            self._keep_record()
            self._look_at_phases()
        self.restart()
        self._allowance.pay(seconds() - began)

    def _hear_of_fetches(self, told: StepTimeline | PhaseSampler) -> None:
        if self._fetch_hooks is not None:
            self._fetch_hooks.undo()
        hooks = self._fetch_hooks = FetchPatch(self._trainer, told.fetch_began, told.fetch_ended)
        self.interval.fetches_from = len(self.interval.tally.cycle_ms) if hooks.hears else None
        hooks.apply()

    # -- what the run can pay, and rests where it cannot ---------------------------------------------------------

    def _keep_record(self) -> None:
        if self.record is not None and (folder := record_folder(self._trainer)) is not None:
            self.record.keep_in(folder)

    def _look_at_phases(self) -> None:
        shows = self.teller is not None and self.teller.shows_figures
        # Under XLA a step runs when it is over: its phases would be those of recording it.
        is_xla = self._trainer.strategy.root_device.type == "xla"
        if self.record is None or is_xla or not (self.record.folder is not None or shows):
            return
        phases = self._phases = PhaseSampler(self._trainer, self.timeline, lambda: has_settled(self._trainer))
        self.record.parts = self.watch.phases = phases
        self._hear_of_fetches(phases)  # which tells the timeline

    def _look(self) -> None:
        """Makes what the run can pay by now. Told at the end of a step, so that the next one begins with it."""
        self._allowance.took(self.steps, self.interval.tally.cycle_ms[-15:])
        allowance, record = self._allowance, self.record
        a_second = int(1 / max(allowance.step_s, 1e-6))
        self._look_at = self.steps + max(self._FIRST_LOOK, min(self.steps, a_second))
        if record is not None and record.folder is None and allowance.can_pay(_RECORD_S):
            with allowance.paying():
                self._keep_record()
        if self.interval.memory is None and allowance.can_pay(_MEMORY_S):
            with allowance.paying():
                self.interval.memory = PeakMemory(self._trainer.strategy.root_device)
                self.interval.memory.restart()
        if self._fetch_hooks is None:
            self._hear_of_fetches(self.timeline)
        if record is not None and record.folder is not None and self._phases is None:
            self._look_at_phases()
        self._is_looking = self.watch.look(self.steps) or self._phases is None

    def _begin_rest(self) -> None:
        """Looks at none of the next steps, where to look at all of them would take too much."""
        self._allowance.took(self.steps, self.interval.tally.cycle_ms[-15:])
        self._allowance.pay(IN_A_ROW * _TIMED_STEP_S)
        # Turns of live trials are all to be equally timed.
        settled = has_settled(self._trainer) and not self.timeline.is_watched
        self._rests.plan(self.steps, self._allowance.part_of_steps(_TIMED_STEP_S) if settled else None)
        if self._rests.to_come:
            self.timeline.release(self.interval)  # others may need each step's time
            self._reported = self.timeline.ended
            if self._fetch_hooks is not None:
                self._fetch_hooks.undo()
            if self._phases is not None:
                self._phases.rest()
            self._go_on_resting()
        else:
            self._rests.samples = 0

    def _go_on_resting(self) -> None:
        if self.record is not None:  # as a single rank's is
            self._rests.go_on(self.record.until_kept)  # at most until there is a loss to be kept

    def rested(self, outputs: Any) -> None:
        """Told at the end of the last step of a rest."""
        self._take_rested(outputs)
        if self._rests.to_come:
            self._go_on_resting()
            return
        if self._phases is not None:
            self._phases.wake()
        if self._fetch_hooks is not None:
            self._fetch_hooks.apply()
        self._rests.samples = 0

    def _take_rested(self, outputs: Any = None, *, is_timed: bool = True) -> None:
        """Takes up the steps of the rest under way that are over."""
        timeline, (steps, samples) = self.timeline, self._rests.passed()
        if not steps or self.record is None:
            return
        if is_timed:  # those of the steps that no other driver has reported, or is about to, are reported here
            unreported = max(0, steps - (timeline.ended + timeline.is_open - self._reported))
            # After a pause they have no time that could be told, and then their samples do not count, either.
            untimed = unreported - timeline.steps_ended(unreported) if unreported else 0
            self._reported = timeline.ended + timeline.is_open
            self.interval.tally.samples += round(samples * (1 - untimed / steps))
        self.record.passed(outputs, steps)
        self.steps += steps

    # -- intervals -----------------------------------------------------------------------------------------------

    def restart(self) -> None:
        self.pause_timeline()
        self.interval.restart()
        self.epochs, self._restarted_at = [], self.steps

    def epoch_began(self) -> None:
        """Told of every epoch, of which an interval may have several."""
        if self.epochs:
            self.pause_timeline()
            self.interval.energy.resume()
        elif self.steps != self._restarted_at:
            self.restart()

    def epoch_ended(self) -> bool:
        """Told of every epoch; whether it is time to measure the interval."""
        self.epochs.append(self._trainer.current_epoch)
        if self._next_interval.is_over():
            return True
        self.pause()
        return False

    def pause(self) -> None:
        self.pause_timeline()
        self.interval.energy.pause()

    def pause_timeline(self) -> None:
        self._take_rested()  # whose time ends here
        self.timeline.pause()
        if self._phases is not None:
            self._phases.pause()

    def step_began(self) -> None:
        """Told of a step that is to be timed. In a rest another driver may have reported steps."""
        self.timeline.claim(self.interval, Driver.LOGGER)
        self.timeline.step_began()

    def step_ended(self, batch: Any, outputs: Any) -> None:
        interval, record, phases = self.interval, self.record, self._phases
        is_watched = interval.flops.is_open
        if is_watched:
            self.watch.ended(self.steps, record)
        if self.steps == 0 and record is not None:
            record.has_images = has_images(leaves(batch))
        has_captured = record is not None and record.folder is not None and record.has_captured()
        samples = interval.samples.count(batch)
        if samples is None:
            interval.knows_samples = False
            if record is not None:
                record.knows_samples = False
        is_apart = is_watched or (phases is not None and phases.is_holding)
        if has_captured:
            self.timeline.labels[StepTally.LABEL] = True
        self.timeline.step_ended(samples or 0, is_apart)
        self.steps += 1
        self._rests.samples += samples or 0
        if self.ends is not None:
            self.ends.step_ended()
        if phases is not None:
            phases.step_ended()
        if record is not None:
            record.step_ended(interval.tally, outputs)
        if self._is_looking and self.steps >= self._look_at:
            self._look()
        if self.steps >= self._rests.next_at:
            self._begin_rest()

    def measure(self) -> EpochSpeed | None:
        """The interval that has ended; None when there was no step. A collective call of ranks that end it together.

        Where they do not, it is that of this rank alone.
        """
        self._take_rested()
        with self._allowance.paying():
            epochs = self.epochs or [self._trainer.current_epoch]
            rank = self.interval.measured(self.steps - self._restarted_at, epochs)
            speed = put_together(gather_at_end(self._trainer, self.ends, rank))
            if self.record is not None and speed is not None:
                self.record.epoch_ended(self.interval.tally, speed)
            if self.teller is not None and speed is not None:
                self.teller.epochs.append(speed)
        self.epochs, self._next_interval = [], Deadline(self._every_s)
        if speed is not None and not self._has_advised:  # what to change in a run that waits for its data
            of_images = self.record is not None and self.record.has_images  # the first rank's: it is what is said
            self._has_advised = advise(self._trainer, speed, has_images=of_images)
        return speed

    def settled(self) -> None:
        """Told where live trials have settled."""
        self._take_rested()
        if self.record is None:
            return
        may_tell = self._allowance.can_pay(_TEXTS_S)  # otherwise loggers are told at the end
        with self._allowance.paying():
            self.record.settled(self.interval.tally)
            if self.teller is not None and may_tell:
                self.teller.settled(self.record.speed)
        self.timeline.leave_out()

    def ended(self, exception: BaseException | None) -> None:
        """Tells record, loggers and console that no step is to follow, and what has ended them."""
        self._take_rested(is_timed=exception is None)  # a device that has failed is not to be asked for the time
        record, teller = self.record, self.teller
        if record is None:
            return
        with self._allowance.paying():
            record.training_ended(self.interval.tally, exception)
        if teller is not None and (exception is None or isinstance(exception, KeyboardInterrupt)):
            self._allowance.took(self.steps, self.interval.tally.cycle_ms[-15:])
            may_tell = self._allowance.can_pay
            with self._allowance.paying():
                teller.ended(record, tells_all=may_tell(_TEXTS_S), draws=may_tell(_FIGURES_S))

    def close(self) -> None:
        if self._phases is not None:
            self._phases.close()
        if self._fetch_hooks is not None:
            self._fetch_hooks.undo()
        self.interval.close()
