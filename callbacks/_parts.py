"""Samples a fit's steps for what their time goes to: data, transfer, forward, backward, optimizer, and the rest."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer

from lightning_accel.core.clocks import StepClock
from lightning_accel.core.parts import PartTimer
from lightning_accel.core.patch import MethodPatch, PatchSet

EVERY = 16
"""Of so many steps one is looked at. The first ones, in which changes are tried, are not."""

DATA = "waiting for data"
REST = "callbacks, logging and the loop"
PARTS = {
    "batch_to_device": "transfer and preprocessing",
    "training_step": "forward",
    "backward": "backward",
    "optimizer_step": "optimizer",
}
"""Methods of a strategy, which Lightning's loop and manual optimization call alike, and what they are."""


class StepParts:
    """Times the parts of every sixteenth step; in others nothing is in the way.

    Communication between ranks is in the part that waits for it: gradients of DDP in the backward pass, say.

    Args:
        trainer: In its fit.
        clock: Its.
    """

    def __init__(self, trainer: Trainer, clock: StepClock) -> None:
        self.timer = PartTimer(clock, REST)
        self._clock, self._strategy = clock, trainer.strategy
        self._told = PatchSet()
        self._steps = 0
        self._taken_ms: defaultdict[str, float] = defaultdict(float)
        self._taken_steps = 0

    def fetch_began(self) -> None:
        """Told of a fetch, tells the clock, too."""
        self._clock.fetch_began()
        self.timer.enter(DATA)

    def fetch_ended(self) -> None:
        """The same of its end."""
        self.timer.leave()
        self._clock.fetch_ended()

    def step_ended(self) -> None:
        """Ends the step that was looked at, and begins the next one if it is one to look at."""
        self._steps += 1
        if self.timer.is_on:
            self.timer.end()
            self._told.undo()
            self.timer.read()
        elif self._steps % EVERY == EVERY - 1:
            # Made anew: what a strategy's method is may have changed since.
            self._told = PatchSet(
                MethodPatch(name, "timed", self._strategy, name, functools.partial(self._timed, part))
                for name, part in PARTS.items()
            )
            self._told.apply()
            self.timer.begin()

    def pause(self) -> None:
        """Forgets the step under way: something else than training comes in between."""
        if self.timer.is_on:
            self.timer.drop()
            self._told.undo()

    def taken(self) -> tuple[dict[str, float], int]:
        """Milliseconds of each part, summed over the steps looked at since this was last asked, and their number."""
        self.timer.read()
        found = dict(self.timer.ms), self.timer.steps
        for part, ms in found[0].items():
            self._taken_ms[part] += ms
        self._taken_steps += found[1]
        self.timer.ms.clear()
        self.timer.steps = 0
        return found

    def mean_ms(self) -> dict[str, float]:
        """Milliseconds of each part, in the mean of all steps looked at and in their order; empty where none was."""
        self.taken()
        names = (DATA, *PARTS.values(), REST)
        return {part: self._taken_ms[part] / self._taken_steps for part in names if part in self._taken_ms}

    def _timed(self, part: str, original: Callable[..., Any]) -> Callable[..., Any]:
        timer = self.timer

        def method(strategy: Any, *args: Any, **kwargs: Any) -> Any:
            timer.enter(part)
            try:
                return original(strategy, *args, **kwargs)
            finally:
                timer.leave()

        return method
