"""Samples a fit's steps for what their time goes to: data, transfer, forward, backward, optimizer, and the rest."""

from __future__ import annotations

import random
import time
from collections import defaultdict
from contextlib import ExitStack

from lightning.pytorch import Trainer

from lightning_accel.callbacks._parts_patch import PartsPatch
from lightning_accel.core.clocks import StepClock
from lightning_accel.core.parts import PartTimer
from lightning_accel.core.torch_private import told_of_loading
from lightning_accel.core.trial import one_line
from lightning_accel.evidence.parts import DATA, OPTIMIZER, ORDER, REST

EVERY = 16
"""Of so many steps one is looked at, drawn by lot: what each fourth step does shows in a fourth of the looks."""


class StepParts:
    """Times the parts of one step in sixteen; in the others every part is one call more.

    Communication between ranks is in the part that waits for it: gradients of DDP in the backward pass, say.

    Args:
        trainer: In its fit. Its strategy and its loggers are told of by an edit, until :meth:`close`.
        clock: Its.

    Attributes:
        failure: Why no step is looked at; empty: they are.
    """

    def __init__(self, trainer: Trainer, clock: StepClock) -> None:
        self.timer = PartTimer(clock, REST)
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
            self._fetch_began_ns = time.thread_time_ns()

    def fetch_ended(self) -> None:
        """The same of its end."""
        if self.timer.is_on:
            self._fetched_ns += time.thread_time_ns() - self._fetch_began_ns
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
            self._loading_cpu_ms += self._fetched_ns / 1e6
            self._samples_ms += self._loaded_ns / 1e6
            self._told.forget(self.timer)
            self.timer.read()
        self._left -= 1
        if self._left == 0:
            before, self._look_in = self._look_in, self._draw.randrange(EVERY)
            self._left = EVERY - before + self._look_in
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

    def _begin(self) -> None:
        if not self.failure:
            self._fetched_ns = self._loaded_ns = 0
            self._told.tell(self.timer)
            self.timer.begin()

    def _loaded(self, took_ns: int) -> None:
        self._loaded_ns += took_ns

    def _drop(self) -> None:
        self._is_told.close()
        self.timer.drop()
        self._told.forget(self.timer)

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

    def taken_loading_cpu_ms(self) -> float:
        """Processor time of this thread within fetches, in the steps looked at since this was last asked."""
        found, self._loading_cpu_ms = self._loading_cpu_ms, 0.0
        return found

    def taken_samples_ms(self) -> float:
        """What it took to load samples, without making batches of them, in the same steps; without workers only."""
        found, self._samples_ms = self._samples_ms, 0.0
        return found

    def close(self) -> None:
        """Leaves strategy and loggers as they were."""
        self._drop()
        self._told.undo()

    def mean_ms(self) -> dict[str, float]:
        """Milliseconds of each part, in the mean of all steps looked at and in their order; empty where none was."""
        self.taken()
        return {part: self._taken_ms[part] / self._taken_steps for part in ORDER if part in self._taken_ms}
