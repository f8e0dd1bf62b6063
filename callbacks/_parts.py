"""Samples a fit's steps for what their time goes to: data, transfer, forward, backward, optimizer, and the rest."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer
from typing_extensions import override

from lightning_accel.core.clocks import StepClock
from lightning_accel.core.parts import PartTimer
from lightning_accel.core.patch import MethodPatch, Patch, PatchSet

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


class PartsPatch(Patch):
    """Has ``enter(part)`` and ``leave()`` called around the parts of a step, those of the dataloader left out.

    All who ask are told by one edit: they may end in another order than they began.
    """

    def __init__(self, strategy: Any, enter: Callable[[str], Any], leave: Callable[[], Any]) -> None:
        super().__init__("parts", "told of parts")
        self._strategy, self._told = strategy, (enter, leave)

    @override
    def _apply(self) -> None:
        found = _TOLD_OF_PARTS.get(self._strategy)
        if found is None:
            # Made anew each time: what a strategy's method is may have changed since.
            patches = PatchSet(
                MethodPatch(name, "told of parts", self._strategy, name, functools.partial(_telling, part))
                for name, part in PARTS.items()
            )
            found = _TOLD_OF_PARTS[self._strategy] = patches, []
            patches.apply()
        found[1].append(self._told)

    @override
    def _undo(self) -> None:
        patches, told = _TOLD_OF_PARTS.get(self._strategy, (PatchSet(), []))
        if self._told in told:
            told.remove(self._told)
        if not told:
            patches.undo()
            _TOLD_OF_PARTS.pop(self._strategy, None)


_Told = list[tuple[Callable[[str], Any], Callable[[], Any]]]
_TOLD_OF_PARTS: weakref.WeakKeyDictionary[Any, tuple[PatchSet, _Told]] = weakref.WeakKeyDictionary()


def _telling(part: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def method(strategy: Any, *args: Any, **kwargs: Any) -> Any:
        _, told = _TOLD_OF_PARTS.get(strategy, (None, []))
        for enter, _ in told:
            enter(part)
        try:
            return original(strategy, *args, **kwargs)
        finally:
            for _, leave in reversed(told):
                leave()

    return method


class StepParts:
    """Times the parts of every sixteenth step; in others nothing is in the way.

    Communication between ranks is in the part that waits for it: gradients of DDP in the backward pass, say.

    Args:
        trainer: In its fit.
        clock: Its.
    """

    def __init__(self, trainer: Trainer, clock: StepClock) -> None:
        self.timer = PartTimer(clock, REST)
        self._clock = clock
        self._told = PartsPatch(trainer.strategy, self.timer.enter, self.timer.leave)
        self._steps = 0

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
        self.timer.ms.clear()
        self.timer.steps = 0
        return found
