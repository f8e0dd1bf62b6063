"""Samples a fit's steps for what their time goes to: data, transfer, forward, backward, optimizer, and the rest."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from typing import NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel

from lightning_accel.callbacks._phase_patch import PartsPatch
from lightning_accel.core.clocks import EventClock, StepClock, perf_counter, thread_time_ns
from lightning_accel.core.idle import HeldTimer, idle_ms
from lightning_accel.core.phase_timer import PartTimer
from lightning_accel.core.torch_private.training import exposed_communication, hold_device, told_of_loading
from lightning_accel.core.trial import one_line
from lightning_accel.evidence.phase_names import BACKWARD, COMMUNICATION, COMPUTE, DATA, IDLE, OPTIMIZER, ORDER, REST
from lightning_accel.lightning.packages import Trainer

EVERY = 16
"""Of so many steps one is looked at, drawn by lot: what each fourth step does shows in a fourth of the looks."""

HOLD_AT, HOLD_EVERY = 4, 64
"""Of so many looks one is at a step that a GPU is held back in, which is not counted; of the first ones, the fourth."""


class Taken(NamedTuple):
    """What some steps took, summed."""

    parts_ms: dict[str, float]
    steps: int
    loading_cpu_ms: float  # processor time of this thread within fetches
    samples_ms: float  # of loading samples, without making batches of them; without workers only


class StepParts:
    """Times the parts of one step in sixteen; in the others every part is one call more.

    What DistributedDataParallel communicates is in the backward pass. On one GPU a few steps are held back, which take
    longer by what the host takes over a step, to tell when the device waits for the host.

    Strategy and loggers of the Trainer are told of by an edit, until :meth:`close`. ``may_hold`` says whether a step
    may take longer now, as nobody decides anything by it.

    Attributes:
        failure: Why no step is looked at; empty: they are.
        is_holding: Whether the step under way is held back.
    """

    def __init__(self, trainer: Trainer, clock: StepClock, may_hold: Callable[[], bool] = lambda: True) -> None:
        self._seen = self.timer = PartTimer(clock, REST)
        self._held = HeldTimer(clock, REST, COMPUTE, hold_device) if _can_hold(trainer, clock) else None
        self._trainer, self._may_hold = trainer, may_hold
        self._looks_to_hold = HOLD_AT
        self._began = 0.0
        self._clock = clock
        self._draw = random.Random(0)  # the same steps in every run
        self._look_in = self._draw.randrange(EVERY)  # steps, the first ones, in which changes are tried, left out
        self._left = EVERY + self._look_in
        self._is_watched = False  # the step under way, by somebody who slows it
        self._was_dropped = False
        self._fetch_began_ns = 0
        self._fetched_ns = 0  # in the step under way, of this thread's processor time
        self._loading_cpu_ms = 0.0
        self._loaded_ns = 0  # in the step under way, samples
        self._samples_ms = 0.0
        self._is_told = ExitStack()  # of samples, within a fetch
        self._taken_ms: defaultdict[str, float] = defaultdict(float)
        self._taken_steps = 0
        self.failure = ""
        self._told = PartsPatch(trainer)
        try:
            self._told.apply()
        except Exception as error:  # objects of anybody's, which may not be edited
            self.failure = one_line(error)

    def fetch_began(self) -> None:
        """Told of a fetch, tells the clock, too."""
        self._clock.fetch_began()
        if self._was_dropped and not self.timer.is_on:  # with its first fetch a cycle begins after a pause
            self._was_dropped = False
            self._begin()
        self.timer.enter(DATA)
        if self.timer.is_on:
            self._is_told.enter_context(told_of_loading(self._loaded))
            self._fetch_began_ns = thread_time_ns()

    def fetch_ended(self) -> None:
        """The same of its end."""
        if self.timer.is_on:
            self._fetched_ns += thread_time_ns() - self._fetch_began_ns
        self._is_told.close()
        self.timer.leave()
        self._clock.fetch_ended()

    def step_ended(self) -> None:
        """Ends the step that was looked at, and begins the next one if it is one to look at."""
        if self._is_watched:
            self._is_watched = False
            self._drop()
        elif self.timer.is_on:
            self.timer.end()
            self._told.forget(self.timer)
            self.timer.read()
            if self.is_holding:
                self._looks_to_hold = HOLD_EVERY
                self.timer = self._seen
            else:
                self._loading_cpu_ms += self._fetched_ns / 1e6
                self._samples_ms += self._loaded_ns / 1e6
                if self._held is not None:
                    self._held.hold_ms = 1e3 * (perf_counter() - self._began)
        self._left -= 1
        if self._left == 0:
            before, self._look_in = self._look_in, self._draw.randrange(EVERY)
            self._left = EVERY - before + self._look_in
            self._looks_to_hold -= 1
            if self._held is not None and self._looks_to_hold <= 0 and self._may_hold():
                self.timer = self._held
            self._begin()

    def watch(self) -> None:
        """Follows a step that has begun, so that it is known which part it is in; its times do not count."""
        if not self.timer.is_on:
            self._begin()
        self._is_watched = True

    @property
    def is_at_optimizer(self) -> bool:
        """Whether the step under way is in the optimizer's own, and not in the closure that it calls."""
        return self.timer.part == OPTIMIZER

    def pause(self) -> None:
        """Forgets the step under way, as something else than training comes in between, and looks at the next one."""
        self._was_dropped |= self.timer.is_on and not self._is_watched
        self._is_watched = False
        self._drop()

    def rest(self) -> None:
        """Told that it will not be told of the next steps: nothing is to stand around them."""
        self.pause()
        self._told.undo()

    def wake(self) -> None:
        """Told that it will be told of the next step."""
        if not self.failure:
            self._told.apply()

    @property
    def is_holding(self) -> bool:
        return self.timer is self._held

    def _begin(self) -> None:
        if not self.failure:
            self._fetched_ns = self._loaded_ns = 0
            self._began = perf_counter()
            self._told.tell(self.timer)
            self.timer.begin()

    def _loaded(self, took_ns: int) -> None:
        self._loaded_ns += took_ns

    def _drop(self) -> None:
        self._is_told.close()
        self.timer.drop()
        self._told.forget(self.timer)
        self.timer = self._seen

    def taken(self) -> Taken:
        """What the steps took that were looked at since this was last asked."""
        seen, held = self._seen, self._held
        seen.read()
        found = dict(seen.ms)
        if held is not None:
            held.read()
            for part, ms in idle_ms(seen, held, COMPUTE).items():
                found[part] -= ms
                found[IDLE] = found.get(IDLE, 0.0) + ms
        found = self._with_communication(found)
        for part, ms in found.items():
            self._taken_ms[part] += ms
        taken = Taken(found, seen.steps, self._loading_cpu_ms, self._samples_ms)
        self._taken_steps += taken.steps
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

    def drop_pending(self) -> None:
        """Forgets what was not read: the device is not to be asked any more."""
        self._seen.drop_pending()
        if self._held is not None:
            self._held.drop_pending()

    def close(self) -> None:
        """Leaves strategy and loggers as they were."""
        self._drop()
        self._told.undo()

    def mean_ms(self) -> dict[str, float]:
        """Milliseconds of each part, in the mean of all steps looked at and in their order; empty where none was."""
        self.taken()
        return {part: self._taken_ms[part] / self._taken_steps for part in ORDER if part in self._taken_ms}


def _can_hold(trainer: Trainer, clock: StepClock) -> bool:
    """Whether its device can be held back, and nobody else waits for it."""
    # On ROCm that clock goes at another rate.
    return isinstance(clock, EventClock) and trainer.world_size == 1 and torch.version.hip is None
