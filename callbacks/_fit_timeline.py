"""The one timeline of a Trainer's fit."""

from __future__ import annotations

import weakref

from lightning_accel.core.clocks import clock_for
from lightning_accel.core.step_timeline import StepTimeline
from lightning_accel.lightning.packages import Trainer

_TIMELINES: weakref.WeakKeyDictionary[Trainer, weakref.ref[StepTimeline]] = weakref.WeakKeyDictionary()


def timeline_of(trainer: Trainer) -> StepTimeline:
    """The timeline of a Trainer. It is there for as long as somebody holds it."""
    held = _TIMELINES.get(trainer)
    timeline = None if held is None else held()
    if timeline is None:
        timeline = StepTimeline(clock_for(trainer.strategy.root_device))
        _TIMELINES[trainer] = weakref.ref(timeline)
    return timeline
