"""The clock, the meters and the counters of one fit, and how they are read at the end of an epoch."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from lightning_accel.callbacks._advising import advise
from lightning_accel.callbacks._allowance import Allowance
from lightning_accel.callbacks._batch_size import SampleCounter
from lightning_accel.callbacks._epoch import EpochSpeed
from lightning_accel.callbacks._epoch_ends import EpochEnds, is_last_of_epoch, reaches_max_steps
from lightning_accel.callbacks._flops import FlopMeter, has_room_for_eager_step, peak_flops_per_sec
from lightning_accel.callbacks._meters import EnergyMeter, host_rss_mib
from lightning_accel.callbacks._phase_sampler import StepParts
from lightning_accel.callbacks._ranks import RankEpoch, put_together, thinned
from lightning_accel.callbacks._record import FitRecord, record_folder
from lightning_accel.callbacks._reporting import report_path
from lightning_accel.callbacks._summary_logger import Teller
from lightning_accel.core.clocks import Deadline, StepClock, clock_for, seconds
from lightning_accel.core.peak_memory import PeakMemory
from lightning_accel.core.ranks import gather, rank_zero_info
from lightning_accel.core.tree import leaves
from lightning_accel.data.advice import has_images
from lightning_accel.evidence.flops import FlopMode
from lightning_accel.evidence.op_profiler import AnatomyMode
from lightning_accel.evidence.record import RECORD_VARIABLE
from lightning_accel.evidence.speed import FEWEST
from lightning_accel.lightning.packages import Trainer
from lightning_accel.lightning.private import FetchPatch
from lightning_accel.tuning.tuning_result import Tuning

_RECORD_S = 0.02  # a header and its lines
_TEXTS_S = 0.1
_MEMORY_S = 4e-4
_TIMED_STEP_S = 1e-4  # of a step of milliseconds, after which no cache holds anything of ours
_IN_A_ROW = 8  # steps that are timed between two rests
_FIGURES_S = 0.5  # most of which is matplotlib's import
_OPERATION_S = 2e-4  # of those that a parameter has in a step, each watched
_TAKING_APART_S = 0.03


@dataclass
class Rest:
    """Steps of a fit that nobody looks at.

    Attributes:
        left: How many are yet to come; 0: the next one is looked at.
    """

    left: int = 0


class FitInstruments:
    """Everything that measures during one fit.

    A step is timed from the first one on. All else is made where the user has asked for it, or once the run can pay.
    Of steps that are so short that to time each of them costs too much, some in a row are timed, and then none for a
    while: for as long as chance decides, so that it is not always the same part of an epoch.

    Args:
        trainer: In its fit.
        batch_size_fn: As of :class:`SpeedMemoryLogger`; likewise ``every_s``.
        rest: Has the steps that it is not to be told of.
        is_asked: Whether the user has asked for all of it.
    """

    _FIRST_COUNTED_STEP = 3
    _TAKEN_APART_AGAIN = 100  # if live trials have settled by then, else so many later
    _FIRST_LOOK = 8  # steps, at which it is seen what the run can pay; then ever rarer ones, up to once a second

    def __init__(
        self,
        trainer: Trainer,
        batch_size_fn: Callable[[Any], int] | None,
        every_s: float,
        rest: Rest,
        *,
        is_asked: bool,
    ) -> None:
        began = seconds()
        self._trainer = trainer
        self._device = trainer.strategy.root_device
        self.steps = 0  # how many there were, without those of the rest under way
        self._rest, self._resting, self._to_rest = rest, 0, 0  # how many there were to come of it; and beyond it
        self._samples_in_a_row = 0
        self._draw = random.Random(0)
        self._has_advised = False
        self._skipped_before = self._skipped_steps()
        self._samples = SampleCounter(batch_size_fn, _say_samples_unknown)
        self._memory: PeakMemory | None = None  # until the run can pay for it
        self.energy = EnergyMeter.open(self._device)  # told of every pause
        self._peak_flops = peak_flops_per_sec(self._device, str(trainer.precision))
        self.clock = clock_for(self._device)  # told of every fetch and step
        self.flops = FlopMeter()  # counts one of the steps
        self.ends = EpochEnds.open(trainer)  # told of every step, where there are several ranks; else None
        self.teller = Teller.open(trainer)  # told where the run settles, on rank 0; else None
        self.record = FitRecord(trainer) if trainer.is_global_zero else None  # told of every step and epoch
        self._parts: StepParts | None = None
        asks = report_path(trainer) is not None or RECORD_VARIABLE in os.environ
        self._allowance = Allowance(trainer, is_asked=is_asked or asks)
        self._every_s = every_s if trainer.world_size == 1 else 0.0  # ranks would not agree on what time it is
        self._next_interval = Deadline(self._every_s)
        self._epochs: list[int] = []  # that were not told of
        self._look_at, self._is_looking = self._FIRST_LOOK, True
        self._rest_at: float = math.inf if trainer.world_size > 1 or self._allowance.is_asked else _IN_A_ROW
        # The number of steps after which one is to be watched, operation by operation; None: none is.
        self.watch_from: int | None = None
        self._was_taken_apart = False
        self._parameters = 0  # counted once
        self._fetch_hooks: FetchPatch | None = None  # until the run can pay for them: what a fetch took is not known
        self._told_of_fetches = 0  # after so many steps of the interval
        if self._allowance.is_asked or trainer.world_size > 1:  # of which one may keep the others waiting
            self._hear_of_fetches(self.clock)
            self._memory = PeakMemory(self._device)
        if self._allowance.is_asked:
            self.watch_from, self._is_looking = 0, False
            self._keep_record()
            self._look_at_parts()
        self.restart()
        self._allowance.pay(seconds() - began)

    def _hear_of_fetches(self, told: StepClock | StepParts) -> None:
        if self._fetch_hooks is not None:
            self._fetch_hooks.undo()
        self._told_of_fetches = len(self.clock.timed.cycle_ms)
        self._fetch_hooks = FetchPatch(self._trainer, told.fetch_began, told.fetch_ended)
        self._fetch_hooks.apply()

    # -- what the run can pay ------------------------------------------------------------------------------------

    def _keep_record(self) -> None:
        if self.record is not None and (folder := record_folder(self._trainer)) is not None:
            self.record.keep_in(folder)

    def _look_at_parts(self) -> None:
        shows = self.teller is not None and self.teller.shows_figures
        if self.record is None or not (self.record.is_kept or shows):
            return
        if self._device.type != "xla":  # there a step runs when it is over: its parts are those of recording it
            self._parts = self.record.parts = StepParts(self._trainer, self.clock, self._has_settled)
            self._hear_of_fetches(self._parts)  # which tells the clock

    def _look(self) -> None:
        """Makes what the run can pay by now. Told at the end of a step, so that the next one begins with it."""
        self._feed()
        allowance, record = self._allowance, self.record
        a_second = int(1 / max(allowance.step_s, 1e-6))
        self._look_at = self.steps + max(self._FIRST_LOOK, min(self.steps, a_second))
        if record is not None and not record.is_kept and allowance.can_pay(_RECORD_S):
            with allowance.paying():
                self._keep_record()
        if self._memory is None and allowance.can_pay(_MEMORY_S):
            with allowance.paying():
                self._memory = PeakMemory(self._device)
                self._memory.restart()
        if self._fetch_hooks is None:
            self._hear_of_fetches(self.clock)
        if record is not None and record.is_kept and self._parts is None:
            self._look_at_parts()
        is_to_watch = self.flops.is_due or (self._parts is not None and not self._was_taken_apart)
        if is_to_watch and allowance.can_pay(self._watching_s()):
            self.watch_from = self.steps
        self._is_looking = is_to_watch or self._parts is None

    def _feed(self) -> None:
        self._allowance.took(self.steps, self.clock.timed.cycle_ms[-15:])

    def _watching_s(self) -> float:
        """What it takes to watch a step, about: it runs uncompiled, and is told of every operation."""
        self._parameters = self._parameters or sum(1 for _ in self._trainer.lightning_module.parameters())
        told_s = 0.0 if self._parts is None else _TAKING_APART_S
        return 2 * self._allowance.step_s + _OPERATION_S * self._parameters + told_s

    # -- rests ---------------------------------------------------------------------------------------------------

    def _begin_rest(self) -> None:
        """Looks at none of the next steps, where to look at all of them would take too much."""
        self._feed()
        self._allowance.pay(_IN_A_ROW * _TIMED_STEP_S)
        self._rest_at = self.steps + _IN_A_ROW
        if not self._has_settled():  # turns of live trials are all to be equally timed
            return
        rest = _IN_A_ROW * (1 / self._allowance.part_of_steps(_TIMED_STEP_S) - 1) * self._draw.uniform(0.5, 1.5)
        self._to_rest = min(round(rest), self.steps)  # a short run is not to rest until it ends
        self._rest_at += self._to_rest
        if self._to_rest:
            if self._fetch_hooks is not None:
                self._fetch_hooks.undo()
            if self._parts is not None:
                self._parts.rest()
            self._go_on_resting()

    def _go_on_resting(self) -> None:
        """Until there is a loss to be kept, at most."""
        assert self.record is not None, "a single rank has one"
        self._rest.left = self._resting = min(self._to_rest, self.record.until_kept)
        self._to_rest -= self._resting

    def rested(self, outputs: Any) -> None:
        """Told at the end of the last step of a rest."""
        self._take_rested(outputs)
        if self._to_rest:
            self._go_on_resting()
            return
        if self._parts is not None:
            self._parts.wake()
        if self._fetch_hooks is not None:
            self._fetch_hooks.apply()
        self._samples_in_a_row = 0

    def _take_rested(self, outputs: Any = None, *, is_timed: bool = True) -> None:
        """Takes up the steps of the rest under way that are over."""
        steps, self._resting = self._resting - self._rest.left, self._rest.left
        if steps and self.record is not None:
            samples = round(steps * self._samples_in_a_row / _IN_A_ROW)
            timed = self.clock.steps_ended(steps, samples) if is_timed else 0
            self.record.passed(self.clock.timed, outputs, steps, timed)
            self.steps += steps

    # -- intervals -----------------------------------------------------------------------------------------------

    def restart(self) -> None:
        self.flops.close()
        self.pause_parts()
        self.clock.restart()
        if self._memory is not None:
            self._memory.restart()
        self._has_unknown_samples = False
        self.energy.restart()
        self._epochs, self._restarted_at, self._told_of_fetches = [], self.steps, 0

    def epoch_began(self) -> None:
        """Told of every epoch, of which an interval may have several."""
        if self._epochs:
            self.pause_clock()
            self.energy.resume()
        elif self.steps != self._restarted_at:
            self.restart()

    def epoch_ended(self) -> bool:
        """Told of every epoch; whether it is time to measure the interval."""
        self._epochs.append(self._trainer.current_epoch)
        if self._next_interval.is_over():
            return True
        self.pause()
        return False

    @property
    def has_epochs(self) -> bool:
        """Whether there are epochs that were not told of."""
        return bool(self._epochs)

    def pause(self) -> None:
        self.pause_clock()
        self.energy.pause()

    def pause_clock(self) -> None:
        self.clock.pause()
        self.pause_parts()

    def pause_parts(self) -> None:
        if self._parts is not None:
            self._parts.pause()

    def watch_if_time(self, batch: Any, batch_idx: int) -> None:
        """Counts the FLOPs of the step that begins, if it is one to count; for the record it is taken apart, too."""
        is_time = self.steps + 1 >= self._FIRST_COUNTED_STEP or self._is_last_chance(batch_idx)
        if not self.flops.is_due and not self._has_settled():
            self.watch_from = self.steps + self._TAKEN_APART_AGAIN
            return
        module = self._trainer.lightning_module
        if not (is_time and has_room_for_eager_step(module, self._device)):
            return
        if self._parts is None:
            self.flops.open(FlopMode())
            return
        parts = self._parts
        parts.watch()
        # Not among the first steps, in which memory budgets are planned by the same meter.
        meters = self.steps >= self._TAKEN_APART_AGAIN
        mode = AnatomyMode(module, clock_for(self._device), lambda: parts.is_at_optimizer, meters=meters)
        mode.begin(batch, self._trainer.optimizers)
        self.flops.open(mode)

    def _has_settled(self) -> bool:
        tuning = getattr(self._trainer.precision_plugin, "tuning", None)
        return not isinstance(tuning, Tuning) or tuning.is_settled

    def step_ended(self, batch: Any, outputs: Any) -> None:
        is_counted = self.flops.is_open
        if is_counted:
            self._watched()
        samples = self._samples.count(batch)
        if self.steps == 0 and self.record is not None:
            self.record.has_images = has_images(leaves(batch))
        if samples is None:
            self._has_unknown_samples = True
            if self.record is not None:
                self.record.knows_samples = False
        parts = self._parts
        self.clock.step_ended(samples or 0, is_counted or (parts is not None and parts.is_holding))
        self.steps += 1
        self._samples_in_a_row += samples or 0
        if self.ends is not None:
            self.ends.step_ended()
        if parts is not None:
            parts.step_ended()
        if self.record is not None:
            self.record.step_ended(self.clock.timed, outputs, is_timed=not is_counted)
        if self._is_looking and self.steps >= self._look_at:
            self._look()
        if self.steps >= self._rest_at:
            self._begin_rest()

    def _watched(self) -> None:
        """Told at the end of a step that was watched."""
        self._was_taken_apart |= self._parts is not None
        mode = self.flops.close(keep=True)
        if not self.flops.is_due:  # else it is tried again at the next one
            is_to_come = self._parts is not None and self.steps < self._TAKEN_APART_AGAIN
            is_payable = is_to_come and self._allowance.can_pay(self._watching_s())
            self.watch_from = self._TAKEN_APART_AGAIN if is_payable else None
        if isinstance(mode, AnatomyMode) and self.record is not None:
            with self._allowance.paying():
                self.record.took_apart(lambda: mode.taken(self._trainer.optimizers))

    def measure(self) -> EpochSpeed | None:
        """The interval that has ended; None when there was no step. A collective call of ranks that end it together.

        Where they do not, it is that of this rank alone.
        """
        self._take_rested()
        with self._allowance.paying():
            rank = self._measured()
            is_together = self.ends is None or self.ends.are_together()
            ranks = gather(rank) if is_together and self._trainer.world_size > 1 else [rank]
            epochs = (self._epochs[0], self._epochs[-1]) if self._epochs else (self._trainer.current_epoch,) * 2
            source = "" if self._memory is None else self._memory.source
            speed = put_together(ranks, epochs=epochs, peak_memory_source=source)
            if self.ends is not None and is_together:
                self.ends.forget()
            if self.record is not None and speed is not None:
                self.record.epoch_ended(self.clock.timed, speed)
            if self.teller is not None and speed is not None:
                self.teller.epochs.append(speed)
        self._epochs, self._next_interval = [], Deadline(self._every_s)
        return speed

    def _measured(self) -> RankEpoch:
        self.flops.close()
        self.clock.settle()
        timed, apart = self.clock.timed, self.clock.apart
        steps, seconds = len(timed.cycle_ms), timed.train_ms / 1e3
        is_measured = steps >= FEWEST
        scaler = self._scaler()
        before, now = self._skipped_before, self._skipped_steps()
        self._skipped_before = now
        knows_samples = not self._has_unknown_samples
        told = slice(self._told_of_fetches, None)
        wait_ms, cycle_ms = sum(timed.each_wait_ms[told]), sum(timed.cycle_ms[told])
        hears = self._fetch_hooks is not None and self._fetch_hooks.hears
        knows_wait = hears and len(timed.cycle_ms[told]) >= FEWEST
        seen, all_steps = steps + len(apart.step_ms), self.steps - self._restarted_at
        samples = (timed.samples + apart.samples) * all_steps / max(1, seen)
        return RankEpoch(
            steps=all_steps,
            samples=round(samples) if knows_samples else None,
            train_seconds=seconds,
            samples_per_sec=_per(timed.samples, seconds) if knows_samples and is_measured else None,
            steps_per_sec=_per(steps, seconds) if is_measured else None,
            data_wait_frac=_per(wait_ms, cycle_ms) if knows_wait else None,
            data_wait_ms=_per(wait_ms, len(timed.cycle_ms[told])) if knows_wait else None,
            peak_memory_mib=None if self._memory is None else self._memory.peak_bytes() / 2**20,
            host_rss_mib=None if self._memory is None else host_rss_mib(),
            flops_per_step=self.flops.flops,
            peak_flops=self._peak_flops,
            loss_scale=None if scaler is None else float(scaler.get_scale()),
            skipped_steps=None if before is None or now is None else now - before,
            energy_j=self.energy.joules(),
            step_ms=thinned(timed.step_ms),
            before_backward_ms=thinned(timed.before_backward_ms),
        )

    def advise(self, speed: EpochSpeed) -> None:
        """Says what to change in a run that waits for its data, the first time that an interval does so."""
        if not self._has_advised:
            of_images = self.record is not None and self.record.has_images  # the first rank's: it is what is said
            self._has_advised = advise(self._trainer, speed, has_images=of_images)

    def settled(self) -> None:
        """Told where live trials have settled."""
        self._take_rested()
        if self.record is None:
            return
        with self._allowance.paying():
            self.record.settled(self.clock.timed)
            if self.teller is not None:
                self.teller.settled(self.record.speed)

    def ended(self, exception: BaseException | None) -> None:
        """Tells record, loggers and console that no step is to follow, and what has ended them."""
        self._take_rested(is_timed=exception is None)  # a device that has failed is not to be asked for the time
        record, teller = self.record, self.teller
        if record is None:
            return
        with self._allowance.paying():
            record.training_ended(self.clock.timed, exception)
        if teller is not None and (exception is None or isinstance(exception, KeyboardInterrupt)):
            self._feed()
            may_tell = self._allowance.can_pay
            with self._allowance.paying():
                parts_ms = {} if self._parts is None else self._parts.mean_ms()
                teller.ended(record, parts_ms, tells_all=may_tell(_TEXTS_S), draws=may_tell(_FIGURES_S))

    def close(self) -> None:
        self.flops.close()
        if self._parts is not None:
            self._parts.close()
        if self._fetch_hooks is not None:
            self._fetch_hooks.undo()
        self.energy.close()

    def _is_last_chance(self, batch_idx: int) -> bool:
        """Whether no step is to follow, and this one is the user's own: AccelPlugin's early steps hold its trials."""
        trainer = self._trainer
        if any(kind.__module__.startswith("lightning_accel.") for kind in type(trainer.precision_plugin).__mro__):
            return False
        is_last_epoch = trainer.max_epochs not in (None, -1) and trainer.current_epoch + 1 >= trainer.max_epochs
        return (is_last_epoch and is_last_of_epoch(trainer, batch_idx)) or reaches_max_steps(trainer)

    def _scaler(self) -> torch.amp.GradScaler | None:
        scaler = getattr(self._trainer.precision_plugin, "scaler", None)
        return scaler if isinstance(scaler, torch.amp.GradScaler) and scaler.is_enabled() else None

    def _skipped_steps(self) -> int | None:
        return getattr(self._scaler(), "skipped_steps", None)


def _per(amount: float, total: float) -> float:
    return amount / total if total > 0 else 0.0


def _say_samples_unknown(batch: Any) -> None:
    rank_zero_info(
        f"SpeedMemoryLogger: a batch of type {type(batch).__name__} does not tell how many samples it holds, so"
        " samples_per_sec is left out. Give SpeedMemoryLogger(batch_size_fn=...) to have it."
    )
