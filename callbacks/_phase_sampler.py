"""Samples a fit's steps for what their time goes to: data, transfer, forward, backward, optimizer, and the rest."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from lightning_accel.callbacks._phase_patch import PartsPatch
from lightning_accel.core.clocks import Stopwatch
from lightning_accel.core.phase_sums import PhaseSums
from lightning_accel.core.report import one_line
from lightning_accel.core.step_timeline import StepTimeline
from lightning_accel.core.torch_private.training import exposed_communication, hold_device, told_of_loading
from lightning_accel.evidence.phase_names import BACKWARD, COMMUNICATION, COMPUTE, DATA, IDLE, OPTIMIZER, REST
from lightning_accel.lightning.packages import Trainer

EVERY = 16
"""Of so many steps one is looked at, drawn by lot: what each fourth step does shows in a fourth of the looks."""

HOLD_AT, HOLD_EVERY = 4, 64
"""Of so many looks one is at a step that a GPU is held back in, which is not counted; of the first ones, the fourth."""


class PhaseSampler:
    """Has the timeline cut one step in sixteen into phases; in the others every phase is one call more.

    What DistributedDataParallel communicates is in the backward pass. On one GPU a few steps are held back, which take
    longer by what the host takes over a step, to tell when the device waits for the host.

    Strategy and loggers of the Trainer are edited until :meth:`close`, so that they tell of their phases.

    Attributes:
        failure: Why no step is looked at; empty if steps are.
        is_holding: Whether the step under way is held back.
    """

    def __init__(self, trainer: Trainer, timeline: StepTimeline, may_hold: Callable[[], bool] = lambda: True) -> None:
        self._trainer, self._timeline, self._may_hold = trainer, timeline, may_hold
        self._seen, self._held = PhaseSums(), PhaseSums()
        self._can_hold = _can_hold(trainer, timeline)
        self.is_holding = self._was_held = False
        self._hold_ms = 0.0
        self._looks_to_hold = HOLD_AT
        self._draw = random.Random(0)  # the same steps in every run
        self._look_in = self._draw.randrange(EVERY)  # steps, the first ones, in which changes are tried, left out
        self._left = EVERY + self._look_in
        self._is_looking = False
        self._is_watched = False  # the step under way, by somebody who slows it
        self._was_dropped = False
        self._look = self._fetch = Stopwatch()
        self._fetched_ms = self._loaded_ms = 0.0  # processor time of fetches, and samples, in the step under way
        self._loading_cpu_ms = self._samples_ms = 0.0  # the same in the steps before
        self._is_told = ExitStack()  # of samples, within a fetch
        self.failure = ""
        self._told = PartsPatch(trainer)
        try:
            self._told.apply()
        except Exception as error:  # objects of anybody's, which may not be edited
            self.failure = one_line(error)

    def fetch_began(self) -> None:
        """Told that a fetch begins, tells the timeline, too."""
        self._timeline.fetch_began()
        if self._was_dropped and not self._is_looking:  # with its first fetch a cycle begins after a pause
            self._was_dropped = False
            self._begin(self._seen)
        self._timeline.enter(DATA)
        if self._is_looking:
            self._is_told.enter_context(told_of_loading(self._loaded))
            self._fetch = Stopwatch(of_thread=True)

    def fetch_ended(self) -> None:
        """Told that a fetch ends, tells the timeline, too."""
        if self._is_looking:
            self._fetched_ms += 1e3 * self._fetch.seconds()
        self._is_told.close()
        self._timeline.leave()
        self._timeline.fetch_ended()

    def enter(self, phase: str) -> None:
        """Told that a phase begins in a step that is looked at."""
        if self.is_holding and not self._was_held and phase in COMPUTE:
            self._was_held = True
            hold_device(self._hold_ms)
        self._timeline.enter(phase)

    def leave(self) -> None:
        """Told that the phase that began last ends."""
        self._timeline.leave()

    def step_ended(self) -> None:
        """Told after the timeline that a step has ended. The next one may be one to look at."""
        if self._is_looking:
            if self.is_holding:
                self._looks_to_hold = HOLD_EVERY
            elif not self._is_watched:
                self._hold_ms = 1e3 * self._look.seconds()  # as long as the host takes over a step
                self._loading_cpu_ms += self._fetched_ms
                self._samples_ms += self._loaded_ms
            self._drop()
        self._left -= 1
        if self._left == 0:
            before, self._look_in = self._look_in, self._draw.randrange(EVERY)
            self._left = EVERY - before + self._look_in
            self._looks_to_hold -= 1
            holds = self._can_hold and self._looks_to_hold <= 0 and self._may_hold()
            self._begin(self._held if holds else self._seen)

    def watch(self) -> None:
        """Follows a step that has begun, so that it is known which phase it is in; its times do not count."""
        self._begin(PhaseSums())
        self._is_watched = True

    @property
    def is_at_optimizer(self) -> bool:
        """Whether the step under way is in the optimizer's own, and not in the closure that it calls."""
        return self._timeline.phase == OPTIMIZER

    def pause(self) -> None:
        """Forgets the step under way, as something else than training comes in between, and looks at the next one."""
        self._was_dropped |= self._is_looking and not self._is_watched
        self._drop()

    def rest(self) -> None:
        """Told that it will not be told of the next steps: nothing is to stand around them."""
        self.pause()
        self._told.undo()

    def wake(self) -> None:
        """Told that it will be told of the next step."""
        if not self.failure:
            self._told.apply()

    def _begin(self, sums: PhaseSums) -> None:
        if not self.failure:
            self._fetched_ms = self._loaded_ms = 0.0
            self._is_looking, self.is_holding, self._was_held = True, sums is self._held, False
            self._look = Stopwatch()
            self._told.tell(self)
            self._timeline.begin_phases(sums, REST)

    def _loaded(self, took_ms: float) -> None:
        self._loaded_ms += took_ms

    def _drop(self) -> None:
        if self._is_looking:
            self._is_looking = self._is_watched = self.is_holding = False
            self._is_told.close()
            self._timeline.drop_phases()
            self._told.forget(self)

    def taken(self) -> dict[str, Any]:
        """What the steps took that were looked at since this was last asked, by the names of ``StepMeasured``."""
        seen = self._seen
        found = dict(seen.ms)
        if self._can_hold:
            for phase, ms in seen.idle_ms(self._held, COMPUTE).items():
                found[phase] -= ms
                found[IDLE] = found.get(IDLE, 0.0) + ms
        taken = {
            "looked_at": seen.steps,
            "parts_ms": self._with_communication(found),
            "loading_cpu_ms": self._loading_cpu_ms,
            "samples_ms": self._samples_ms,
        }
        self._loading_cpu_ms = self._samples_ms = 0.0
        seen.clear()
        return taken

    def _with_communication(self, parts_ms: dict[str, float]) -> dict[str, float]:
        """Tells apart what of a backward pass was nothing but communication, where DDP says so."""
        wrapped = self._trainer.strategy.model
        if not isinstance(wrapped, DistributedDataParallel) or BACKWARD not in parts_ms:
            return parts_ms
        exposed = parts_ms[BACKWARD] * exposed_communication(wrapped)
        seen = parts_ms.get(COMMUNICATION, 0.0)  # other than DDP's
        return {**parts_ms, BACKWARD: parts_ms[BACKWARD] - exposed, COMMUNICATION: seen + exposed}

    def close(self) -> None:
        """Leaves strategy and loggers as they were."""
        self._drop()
        self._told.undo()


def _can_hold(trainer: Trainer, timeline: StepTimeline) -> bool:
    """Whether its device can be held back, and nobody else waits for it."""
    # On ROCm that clock goes at another rate.
    return not timeline.clock.is_host and trainer.world_size == 1 and torch.version.hip is None
