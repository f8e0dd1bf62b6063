"""Live trials in a plain PyTorch loop: a turn runs from one training step's beginning to the next one's."""

from __future__ import annotations

from collections import deque

import torch

from lightning_accel.core.clocks import StepClock, clock_for
from lightning_accel.engine import Engine
from lightning_accel.tuning.comparison import Choices
from lightning_accel.tuning.trials import LiveTrials
from lightning_accel.tuning.tuning_result import Tuning

_QUIET_STEPS = 2  # after the trials of the parts, for caches to fill


class LoopTurns:
    """Has the arms of an engine take turns on the steps of a loop.

    What is between two steps counts: the optimizer, and the fetch of a batch, which nothing tells apart here.

    Args:
        engine: At work on the model.
        device: The model's.
        steps: How many training steps there will be, about.
    """

    def __init__(self, engine: Engine, device: torch.device, steps: int) -> None:
        self._engine = engine
        self._device = device
        self._clock = StepClock()
        self._steps_left = steps
        self._quiet_steps = 0
        self._read = 0
        self._unheard: deque[bool] = deque()  # of turns whose time is not known yet, whether they were interrupted
        self._is_interrupted = False
        self._is_closed = False
        self._trials: LiveTrials | None = None

    @property
    def tuning(self) -> Tuning | None:
        """What the trials have come to; None before they began."""
        return None if self._trials is None else self._trials.tuning

    def step_begins(self) -> None:
        """Ends the turn under way, and begins the next one."""
        self._steps_left -= 1
        if self._is_closed:
            return
        if self._engine.is_trying or self._quiet_steps < _QUIET_STEPS:
            self._quiet_steps += not self._engine.is_trying
            return
        if self._trials is None:
            self._trials = self._made()
        else:
            self._clock.step_ended(0)
            self._unheard.append(self._is_interrupted)
            known = self._clock.timed.step_ms
            for ms in known[self._read :]:
                self._trials.took(None if self._unheard.popleft() else ms / 1e3)
            self._read = len(known)
        self._is_interrupted = False
        self._trials.begin()
        self._is_closed = self._trials.is_over
        self._clock.fetch_began()
        self._clock.fetch_ended()

    def interrupt(self) -> None:
        """Tells that something else than training goes on: the turn does not count."""
        self._is_interrupted = True

    def close(self) -> None:
        """Switches nothing any more."""
        self._is_closed = True

    def _made(self) -> LiveTrials:
        # A deterministic run decides nothing by the clock.
        arms = [] if torch.are_deterministic_algorithms_enabled() else self._engine.arms()
        self._clock = clock_for(self._device)

        def put(choices: Choices) -> None:
            self._engine.disable(arm.name for arm in arms if arm.name not in choices)

        return LiveTrials(arms, self._steps_left, put=put, say=self._say)

    def _say(self, line: str) -> None:
        assert self._trials is not None
        tuning, record = self._trials.tuning, self._engine.report.of("tuning")
        record.is_on, record.status, record.details = bool(tuning.choices), tuning.line(), tuning.table()
        record.data = tuning.to_dict()
