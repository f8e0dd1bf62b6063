"""Live trials under a Trainer: collects the arms, starts the trials and reports their results."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from typing_extensions import override

from lightning_accel.callbacks._epoch_ends import turns_left
from lightning_accel.callbacks._tuner_searches import Searches
from lightning_accel.callbacks.speed_memory import SpeedMemoryLogger
from lightning_accel.core.heap import release_free_memory
from lightning_accel.core.peak_memory import PeakMemory
from lightning_accel.core.ranks import gather, rank_zero_info
from lightning_accel.core.report import one_line
from lightning_accel.experiment.store import DamagedError, Key
from lightning_accel.lightning.run_engine import RunEngine
from lightning_accel.lightning.trainer_turns import TrainerTurns
from lightning_accel.techniques.arms import OFF, Arm
from lightning_accel.tuning import verdict_cache
from lightning_accel.tuning.comparison import Choices
from lightning_accel.tuning.trial_scheduler import MIN_TURNS
from lightning_accel.tuning.trials import LiveTrials
from lightning_accel.tuning.tuning_result import Tuning
from lightning_accel.tuning.turns import set_choices
from lightning_accel.tuning.verdict_cache import TUNINGS, Known, run_key

_LOOKS_AGAIN = 16  # batches between two checks of the remaining length of a run that is too short
_TRIAL_BATCHES = 2  # batches on which techniques run their own trials
_QUIET_BATCHES = 2  # batches after those trials, in which caches fill


class LiveTuning(TrainerTurns):
    """The live trials of one fit. They begin after the techniques' own trials. Report, console and loggers show them.

    Attributes:
        resumed: The tuning of an earlier run; a checkpoint may set it later.
    """

    def __init__(
        self,
        engine: RunEngine,
        loggers: Callable[[], Sequence[SpeedMemoryLogger]],
        switched: Callable[[bool], Any],
    ) -> None:
        super().__init__(engine.module.trainer)
        self._engine, self._loggers, self._switched = engine, loggers, switched
        self._program = engine.program.key
        self.resumed = engine.kept.tuning
        self._told: Choices | None = None  # the choices last printed on the console
        self._searches = Searches(self._trainer)
        self._key: Key | None = None
        self._known: Tuning | None = None
        self._has_met = self._program is not None  # the first batch was met
        self._seen = 0  # training batches so far
        self._quiet_batches = 0
        self._arms: list[Arm] = []
        self._is_too_short = self._is_nothing = False
        self._batches = itertools.count(1)  # since the run was found to be too short

    @property
    def has_ended(self) -> bool:
        """Whether the rest of the run is plain, since no option was faster or there are no options."""
        return self.have_failed or (self._is_nothing if self.trials is None else self.trials.is_over)

    @property
    def tuning(self) -> Tuning | None:
        """Returns the trials' results so far. Before the trials began: those of the resumed run, or None."""
        return self.resumed if self.trials is None else self.trials.tuning

    @property
    def settled(self) -> Tuning | None:
        """Returns the trials' results once they are settled; None before, and after an error has ended them."""
        tuning = None if self.have_failed else self.tuning
        return tuning if tuning is not None and tuning.is_settled else None

    def do_without(self, why: str) -> None:
        """Has the rest of the run be plain, before trials have begun."""
        report = self._engine.report
        set_choices(self._engine, self._engine.arms(), {})
        report.settled([*report.techniques], why)
        report.of("tuning").status = f"not tried: {why}"
        self._is_nothing = True

    @override
    def batch(self, batch: Any) -> None:
        if self.have_failed:
            return
        try:
            super().batch(batch)
        except Exception as error:
            self.end_after(error, self._engine)

    @override
    def next_turn(self) -> None:
        try:
            super().next_turn()
        except Exception as error:
            self.end_after(error, self._engine)

    @override
    def lose(self, name: str) -> None:
        self._arms = [arm for arm in self._arms if arm.name != name]
        super().lose(name)

    @override
    def _make_trials(self, batch: Any) -> LiveTrials | None:
        # A search runs the fit's loop within the fit, for a few steps and perhaps with other batches.
        if self._searches.are_running():
            return None
        if not self._has_met:
            self._recall_verdicts(batch)
        trainer = self._trainer
        self._seen += 1
        # All ranks must get here at the same batch, and a rank that reverted its edits has ended its trial early.
        is_trying = self._engine.is_trying if trainer.world_size == 1 else self._seen <= _TRIAL_BATCHES
        if is_trying or self._quiet_batches < _QUIET_BATCHES:
            self._quiet_batches += not is_trying
            return None
        if self._key is None:
            self._keep_verdicts()
        if self._is_too_short and next(self._batches) % _LOOKS_AGAIN:
            return None
        turns = turns_left(trainer)
        if self._key is None:
            # A deterministic run bases no decision on time measurements.
            is_none = torch.are_deterministic_algorithms_enabled() or self._engine.is_trying
            self._arms = self._had_by_all([] if is_none else self._engine.arms())
            self._key = run_key(trainer.lightning_module, batch, self._engine.host.described, self._arms)
            self._known = self.resumed or self._known or (self._recalled(self._key) if self._arms else None)
            possible = {(arm.name, choice) for arm in self._arms for choice in arm.choices}
            if self._known is not None and self._known.choices.items() - possible:
                self._known = None  # found on another machine, or with other settings
            if trainer.world_size > 1 and self._arms:  # either all ranks try or none; decided once
                turns = min(gather(turns))
                if self._known is None and turns < MIN_TURNS:
                    self._arms = []
        known = self._known
        if known is not None and known.is_open_for(turns) and known is not self.resumed and turns >= MIN_TURNS:
            known = None
        if not self._arms or (known is None and turns < MIN_TURNS):
            if not self._is_too_short:
                set_choices(self._engine, self._arms, {})  # arms that this run cannot test must not stay on
            self._is_too_short = True  # may change if fewer batches are accumulated later
            self._is_nothing = self._engine.purse is not None
            return None
        if known is not None:
            self._record(known)
        peak = PeakMemory(trainer.strategy.root_device)
        return LiveTrials(
            self._arms,
            turns,
            put=self._put,
            say=self._say,
            peak=peak if peak.can_restart else None,
            gather=gather if trainer.world_size > 1 else None,
            known=known,
            is_trusted=known is not None and known is self.resumed,
            purse=self._engine.purse,
        )

    def _had_by_all(self, arms: list[Arm]) -> list[Arm]:
        """Returns the arms that every rank has. A rank may have reverted its edits or found nothing to do.

        Others are switched off, as nothing can show that they are faster.
        """
        if self._trainer.world_size == 1:
            return arms
        own = {(arm.name, arm.choices, arm.asked_alone): arm for arm in arms}
        ranks = gather(set(own))
        for one, arm in own.items():
            if not all(one in had for had in ranks):
                arm.choose(OFF)
        return [arm for one, arm in own.items() if all(one in had for had in ranks)]

    def _recall_verdicts(self, batch: Any) -> None:
        """Applies an earlier run's verdicts on this exact program, before the first training step and on all ranks."""
        self._has_met, trainer = True, self._trainer
        if self._engine.decisions or not self._engine.is_trying:  # a resumed run has its own verdicts
            return
        if torch.are_deterministic_algorithms_enabled():  # an edit applied from the first step on changes rounding
            return
        known = None
        try:
            self._program = self._engine.program.key_with(batch)
            if trainer.is_global_zero and self._program is not None:
                known = verdict_cache.recall(self._program)
        except Exception as error:  # of a batch of another library's, or of the file
            self._engine.report.note(f"no earlier verdicts could be looked up: {one_line(error)}")
        known = trainer.strategy.broadcast(known)
        if known is not None:
            self.recall(known)

    def recall(self, known: Known | None, tuning: Tuning | None = None) -> None:
        """Applies the verdicts of an earlier run of this exact program, and the speeds of a similar one."""
        self._known = tuning if known is None or known.tuning is None else known.tuning
        if known is not None and known.decisions:
            self._engine.carry_out(known.decisions)
            self._engine.report.note(
                f"{', '.join(known.decisions)}: as tried by a run of this very program on {known.written:%Y-%m-%d};"
                " `lightning-accel cache --clear` has it tried again"
            )

    def _keep_verdicts(self) -> None:
        if self._program is None or not self._trainer.is_global_zero:
            return
        try:
            verdict_cache.remember(self._program, self._engine.decisions, self.settled or self._known)
        except OSError as error:
            self._engine.report.note(f"what the trials found could not be remembered: {error}")

    def _put(self, choices: Choices) -> None:
        self._switched(not choices)
        off = (arm.name for arm in self._arms if arm.name not in choices)
        self._engine.disable(off, pauses=lambda name: not choices)

    def _recalled(self, key: Key) -> Tuning | None:
        known, complaint = None, ""
        if self._trainer.is_global_zero:
            try:
                entry = TUNINGS.get(key)
                known = None if entry is None else entry.value
            except DamagedError as error:
                complaint = f"{error}: what it remembers is not used. `lightning-accel cache --clear` removes it."
        known, complaint = self._trainer.strategy.broadcast((known, complaint))
        if complaint:
            self._engine.report.note(complaint)
        return known

    def _record(self, tuning: Tuning) -> None:
        tuning.show_in(self._engine.report.of("tuning"))
        resting = {arm.name for arm in self._arms} - tuning.choices.keys() if tuning.is_settled else set()
        if tuning.is_settled and not tuning.choices:  # the rest of the run is plain
            resting |= self._engine.without_arm
        self._engine.report.settled(resting)

    def _say(self, line: str) -> None:
        tuning = self.tuning
        assert tuning is not None
        self._record(tuning)
        if line != tuning.line():
            self._engine.report.note(line)
        if not tuning.is_settled:
            return
        if tuning.choices != self._told:  # skipped if an audit has confirmed known choices
            self._told = dict(tuning.choices)
            rank_zero_info(f"lightning-accel: from step {self._trainer.global_step:,} on {line}")
            for logger in self._loggers():
                logger.settled()
            release_free_memory()  # memory of rejected arms that the heap would keep
        if tuning.whole is None:
            return
        interval = tuning.whole.interval
        metrics = {"ratio": interval.ratio, "low": interval.low, "arms": float(len(tuning.choices))}
        for logger in self._loggers():
            logger.log_beside({f"accel/tuning/{name}": value for name, value in metrics.items()})
        self._keep_verdicts()
        if self._trainer.is_global_zero and self._key is not None and not tuning.is_earlier:
            try:
                TUNINGS.put(self._key, tuning.to_dict())
            except OSError as error:
                self._engine.report.note(f"what was settled could not be remembered: {error}")
