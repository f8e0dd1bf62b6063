"""Live trials in a plain PyTorch loop."""

from __future__ import annotations

import torch

from lightning_accel.core.clocks import clock_for
from lightning_accel.core.step_timeline import StepTimeline
from lightning_accel.engine import Engine
from lightning_accel.tuning.comparison import Choices
from lightning_accel.tuning.trials import LiveTrials
from lightning_accel.tuning.tuning_result import Tuning
from lightning_accel.tuning.turns import Turns

_QUIET_STEPS = 2  # steps after the techniques' own trials, in which caches fill


class LoopTuning:
    """Runs live trials of an engine's arms in a loop of about ``steps`` steps."""

    def __init__(self, engine: Engine, device: torch.device, steps: int) -> None:
        self._engine, self._steps_left = engine, steps
        self._quiet_steps = 0
        self._is_closed = False
        self._turns = Turns(StepTimeline(clock_for(device)))

    @property
    def tuning(self) -> Tuning | None:
        """Returns the results of the trials; None before they began."""
        return None if self._turns.trials is None else self._turns.trials.tuning

    def step_begins(self) -> None:
        """Ends the current turn, and begins the next one."""
        self._steps_left -= 1
        turns = self._turns
        if self._is_closed or (turns.trials is not None and not turns.are_taken):
            return
        if self._engine.is_trying or self._quiet_steps < _QUIET_STEPS:
            self._quiet_steps += not self._engine.is_trying
            return
        if turns.trials is None:
            turns.start(self._trials())
        turns.step_ends()
        turns.next_turn()
        turns.step_begins()

    def interrupt(self) -> None:
        """Excludes the current turn, since other work than training follows."""
        self._turns.interrupt()

    def close(self) -> None:
        """Ends the trials: nothing is switched any more."""
        self._is_closed = True

    def _trials(self) -> LiveTrials:
        # A deterministic run bases no decision on time measurements.
        arms = [] if torch.are_deterministic_algorithms_enabled() else self._engine.arms()

        def put(choices: Choices) -> None:
            self._engine.disable(arm.name for arm in arms if arm.name not in choices)

        return LiveTrials(arms, self._steps_left, put=put, say=self._say)

    def _say(self, line: str) -> None:
        if self.tuning is not None:
            self.tuning.show_in(self._engine.report.of("tuning"))
