"""The timeline of a training: what each step took, in work, waiting and phases, without ever stopping the device."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from lightning_accel.core.clocks import HostClock
from lightning_accel.core.phase_sums import PhaseSums, Switch

_LATEST = slice(-8, None)  # the steps whose waiting stands for that of steps of which nothing else was told
_ENDED = 3  # the place of that instant in a cycle


class StepTimes(NamedTuple):
    """What a step took, in milliseconds; or each of several that ended together.

    Attributes:
        step_ms: The step itself, without its waiting for data and the gap before it.
        cycle_ms: From the end of the step before it to its own end.
        wait_ms: Waiting for data; 0 for steps that ended together, of which it is not known.
        before_backward_ms: From the cycle's beginning to the first backward pass; None if there was no such pass.
        samples: How many samples they trained on.
        together: How many steps ended together; 0 for a step that was timed by itself.
        is_apart: Whether something slowed the step down, so that it does not count.
        label: What :meth:`StepTimeline.step_ended` was given.
    """

    step_ms: float
    cycle_ms: float
    wait_ms: float
    before_backward_ms: float | None
    samples: int
    together: int
    is_apart: bool
    label: Any


class StepTimeline:
    """Cuts a training into cycles, one a step. Each runs from the end of the step before it to its own end.

    A cycle has three parts: the *gap* before its first fetch (loggers, progress bar), *waiting* inside fetches, and
    the *step*, which is all the rest. On a GPU waiting is what the *device* waited: a fetch that is over before the
    device has worked off its queue costs nothing.

    Steps that are asked for have *phases* too, which add up to all of the cycle. Time counts for the phase that was
    entered last and not left: an optimizer's step that calls forward and backward has what is left without them.

    Args:
        clock: The clock of the device that trains.
        listeners: Called in their order with each step that has ended, once the device has passed it.
    """

    def __init__(self, clock: HostClock, *listeners: Callable[[StepTimes], object]) -> None:
        self.clock, self.listeners = clock, list(listeners)
        # Looked up once, as a step needs each of them several times.
        self._mark, self._elapsed, self._unit_ms = clock.mark, clock.elapsed, clock.unit_ms
        self._take = self._read if clock.is_host else self._keep
        self._pending: deque[tuple[Any, ...]] = deque()
        self.restart()

    def restart(self) -> None:
        """Forgets everything, also the step under way."""
        self._began: Any = None
        self._fetches: list[Any] = []  # begin, end, begin, end, ...
        self._backward: Any = None
        self._pending.clear()
        self.drop_phases()
        self.clock.follow_stream()

    @property
    def is_open(self) -> bool:
        """Whether a cycle has begun, and has not ended."""
        return bool(self._fetches)

    @property
    def is_in_step(self) -> bool:
        """Whether time that passes now is a step's: a cycle is open, and no fetch."""
        return self.is_open and len(self._fetches) % 2 == 0

    def fetch_began(self) -> None:
        self._fetches.append(self._mark())

    def fetch_ended(self) -> None:
        self._fetches.append(self._mark())

    def step_began(self) -> None:
        """Opens the cycle if no fetch has."""
        if not self._fetches:
            self._fetches += [now := self._mark(), now]

    def backward_began(self) -> None:
        """Marks the step's first backward pass. Within a step only."""
        if self._fetches and self._backward is None:
            self._backward = self._mark()

    def step_ended(self, samples: int = 0, is_apart: bool = False, label: Any = None, at: Any = None) -> None:
        """Ends the cycle under way, and tells the listeners of what the device has passed.

        Args:
            samples: How many samples the step trained on.
            is_apart: Whether something slowed it down.
            label: What listeners are to be given with its times.
            at: The instant of the clock at which it ended; None if that is now.
        """
        ended = self._mark() if at is None else at
        if self._fetches:
            phases = self._ended_phases(ended) if self._stack else None
            self._take(self._began, self._fetches, self._backward, ended, samples, is_apart, 0, label, phases)
        self._began, self._fetches, self._backward = ended, [], None

    def steps_ended(self, steps: int, samples: int = 0, label: Any = None) -> int:
        """Ends steps of which nothing else was told: their cycles are equal parts of the time since the last end.

        Returns:
            How many steps count: none if there was a pause.
        """
        began, self._began = self._began, self._mark()
        if began is None:
            return 0
        self._take(began, [began, began], None, self._began, samples, False, steps, label, None)
        return steps

    def pause(self) -> None:
        """Leaves the gap that is running out of the time. Within a cycle, it does nothing."""
        if not self._fetches:
            self._began = None

    def settle(self) -> None:
        """Tells the listeners of all steps that have ended. The only call that may wait for the device."""
        if self._pending:
            self.clock.wait_for(self._pending[-1][_ENDED])
            self._read_passed()

    # -- phases --------------------------------------------------------------------------------------------------

    def drop_phases(self) -> None:
        """Forgets the phases of the step under way."""
        self._stack: list[str] = []
        self._switches: list[Switch] = []

    def begin_phases(self, sums: PhaseSums, rest: str) -> None:
        """Has the step under way, or the one that begins now, told to ``sums`` by phases, the first being ``rest``."""
        self._sums, self._stack = sums, [rest]
        self._switches = [Switch(rest, self._mark(), False)]

    @property
    def phase(self) -> str:
        """The phase that a step under way is in; empty if its phases are not asked for."""
        return self._stack[-1] if self._stack else ""

    def enter(self, phase: str) -> None:
        """Begins a phase; without effect if phases are not asked for."""
        if self._stack:
            self._stack.append(phase)
            self._switch(phase, self._mark())

    def leave(self) -> None:
        """Ends the phase that was entered last."""
        if len(self._stack) > 1:
            self._stack.pop()
            self._switch(self._stack[-1], self._mark())

    def _switch(self, phase: str, mark: Any) -> None:
        self._switches.append(Switch(phase, mark, self.clock.has_passed(self._switches[-1].mark)))

    def _ended_phases(self, ended: Any) -> tuple[PhaseSums, list[Switch]]:
        self._switch("", ended)
        phases = self._sums, self._switches
        self.drop_phases()
        return phases

    # -- reading -------------------------------------------------------------------------------------------------

    def _keep(self, *cycle: Any) -> None:
        self._pending.append(cycle)
        self._read_passed()

    def _read_passed(self) -> None:
        # All instants are of one stream, so what came before one that has passed has passed too.
        while self._pending and self.clock.has_passed(self._pending[0][_ENDED]):
            self._read(*(cycle := self._pending.popleft()))
            began, fetches, backward, *_, phases = cycle
            # A cycle's end stays: it is the next one's beginning.
            switched = [] if phases is None else [switch.mark for switch in phases[1][:-1]]
            self.clock.release((*fetches, backward, began, *switched))

    def _read(
        self,
        began: Any,
        fetches: list[Any],
        backward: Any,
        ended: Any,
        samples: int,
        is_apart: bool,
        together: int,
        label: Any,
        phases: Any,
    ) -> None:
        elapsed, ms = self._elapsed, self._unit_ms
        opened = fetches[0]
        waited = elapsed(fetches[1], opened)
        if len(fetches) > 2:
            waited += sum(map(elapsed, fetches[3::2], fetches[2::2]))
        took = cycle_took = elapsed(ended, opened)
        if began is not None:
            cycle_took += elapsed(opened, began)
        if together:
            took = cycle_took = took / together
        before = None if backward is None else elapsed(backward, opened if began is None else began) * ms
        # By tuple's own constructor: that of a named tuple takes as long as all the rest.
        times = ((took - waited) * ms, cycle_took * ms, waited * ms, before, samples, together, is_apart, label)
        step = tuple.__new__(StepTimes, times)
        if phases is not None:
            phases[0].add(self.clock, phases[1])
        for told in self.listeners:
            told(step)


class StepTally:
    """Keeps the times of steps that count, in milliseconds, as :meth:`took` is told of them.

    Steps that ended together are taken to have waited for data as the latest steps before them did.

    Attributes:
        step_ms: Of each step that was timed by itself; likewise ``before_backward_ms``.
        cycle_ms: Of each step; likewise ``wait_ms``.
        labelled_ms: The cycles of steps with a label that is true.
        samples: How many samples the steps trained on.
        steps_apart: How many steps do not count; likewise ``samples_apart``.
    """

    def __init__(self) -> None:
        self.step_ms, self.cycle_ms, self.wait_ms = array("d"), array("d"), array("d")
        self.before_backward_ms, self.labelled_ms = array("d"), array("d")
        self.samples = self.steps_apart = self.samples_apart = 0

    def took(self, step: StepTimes) -> None:
        """Keeps the times of a step, or of several that ended together."""
        step_ms, cycle_ms, wait_ms, before_backward_ms, samples, together, is_apart, label = step
        if is_apart:
            self.steps_apart += 1
            self.samples_apart += samples
            return
        self.samples += samples
        if together:
            waited = sum(self.wait_ms[_LATEST]) / (sum(self.cycle_ms[_LATEST]) or 1.0)
            self.cycle_ms.extend([cycle_ms] * together)
            self.wait_ms.extend([waited * cycle_ms] * together)
            return
        self.step_ms.append(step_ms)
        self.cycle_ms.append(cycle_ms)
        self.wait_ms.append(wait_ms)
        if before_backward_ms is not None:
            self.before_backward_ms.append(before_backward_ms)
        if label:
            self.labelled_ms.append(cycle_ms)
