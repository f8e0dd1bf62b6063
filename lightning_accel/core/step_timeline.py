"""Times each step of a training, its waiting for data and its phases, without blocking the device."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

from lightning_accel.core.clocks import HostClock
from lightning_accel.core.phase_sums import PhaseSums, Switch

_LATEST = slice(-8, None)  # the steps whose share of waiting is used for steps that ended together


class Driver(IntEnum):
    """Who reports steps to a timeline. If several could, the highest one does."""

    MEMORY = 1
    TRACES = 2
    PLAIN_START = 3
    TURNS = 4
    LOGGER = 5


class StepTimes(NamedTuple):
    """The times of one step in milliseconds, or the average of several steps that ended together.

    Attributes:
        step_ms: The step itself, without its waiting for data and the gap before it.
        cycle_ms: From the end of the previous step to its own end.
        wait_ms: Waiting for data; 0 for steps that ended together, since it is unknown.
        before_backward_ms: From the start of the cycle to the first backward pass; None if there was no such pass.
        samples: How many samples were trained on.
        together: How many steps ended together; 0 for a step that was timed by itself.
        is_apart: Whether something slowed the step down, so that it does not count.
        labels: The notes of listeners in :attr:`StepTimeline.labels`.
        tail_ms: From the end of the step to the end of its tail, without what :meth:`StepTimeline.mark_aside` excludes;
            0 if nobody asks for tails.
    """

    step_ms: float
    cycle_ms: float
    wait_ms: float
    before_backward_ms: float | None
    samples: int
    together: int
    is_apart: bool
    labels: Mapping[Any, Any]
    tail_ms: float


class StepTimeline:
    """Divides a training into one cycle per step. Each cycle runs from the end of the previous step to its own end.

    A cycle has three parts: the *gap* before its first fetch (loggers, progress bar), *waiting* inside fetches, and the
    *step*, which is the rest. On a GPU, waiting is the time that the *device* waited: a fetch that ends before the
    device has finished its queue costs nothing.

    On request a step also has *phases*, which add up to the whole cycle. Time counts for the innermost open phase: an
    optimizer step that calls forward and backward gets only the remaining time.

    Args:
        clock: The clock of the device that trains.
        listeners: Called in this order with each step that has ended, once the device has passed its end.

    Attributes:
        labels: Notes of listeners on the current or next step, with the listeners as keys.
        has_tails: Whether each step has a tail, which ends at :meth:`tail_ended`.
        is_watched: Whether a listener needs each step reported by itself.
        driver: Who reports steps; None if nobody does. All others only listen.
        ended: How many steps were reported so far.
    """

    def __init__(self, clock: HostClock, *listeners: Callable[[StepTimes], object]) -> None:
        self.clock, self.listeners = clock, list(listeners)
        # Looked up once, since a step uses each of them several times.
        self._mark, self._elapsed, self._unit_ms = clock.mark, clock.elapsed, clock.unit_ms
        self._take = self._read if clock.is_host else self._keep
        self._pending: deque[tuple[Any, Any, Sequence[Any]]] = deque()  # (last instant of a cycle, its parts, its tail)
        self._held: tuple[Any, ...] | None = None  # the parts of a cycle whose tail is open
        self.labels: dict[Any, Any] = {}
        self.has_tails = self.is_watched = False
        self.driver: Any = None
        self.ended = self._rank = 0
        self.restart()

    def claim(self, driver: Any, rank: Driver) -> bool:
        """Lets ``driver`` report steps unless another of the same or a higher rank does. Returns whether it may."""
        if rank > self._rank:
            self.driver, self._rank = driver, rank
        return self.driver is driver

    def release(self, driver: Any) -> None:
        """Stops ``driver`` from reporting steps."""
        if self.driver is driver:
            self.driver, self._rank = None, 0

    def forget(self, listener: Callable[[StepTimes], object]) -> None:
        """Removes a listener, if it is there."""
        if listener in self.listeners:
            self.listeners.remove(listener)

    def restart(self) -> None:
        """Reports all steps that have ended, and discards the current one."""
        self.settle()
        self._began: Any = None
        self._fetches: list[Any] = []  # begin, end, begin, end, ...
        self._backward: Any = None
        self._tail: list[Any] = []  # end of the step, begin and end of each excluded part, ..., end of the tail
        self.drop_phases()
        self.clock.follow_stream()

    @property
    def is_open(self) -> bool:
        """Whether a cycle has begun and not ended."""
        return bool(self._fetches)

    @property
    def has_begun(self) -> bool:
        """Whether the present time counts for a cycle: not after a pause."""
        return self._began is not None or self.is_open

    @property
    def is_in_step(self) -> bool:
        """Whether the present time counts for a step or its tail, and is not excluded."""
        return len(self._fetches) % 2 == 0 if self._fetches else len(self._tail) % 2 == 1

    def fetch_began(self) -> None:
        self._fetches.append(self._mark())

    def fetch_ended(self) -> None:
        self._fetches.append(self._mark())

    def step_began(self) -> None:
        """Opens the cycle unless a fetch has opened it."""
        if not self._fetches:
            self._fetches += [now := self._mark(), now]

    def backward_began(self) -> None:
        """Marks the step's first backward pass. Does nothing outside of a step."""
        if self._fetches and self._backward is None:
            self._backward = self._mark()

    def step_ended(self, samples: int = 0, is_apart: bool = False, at: Any = None) -> None:
        """Ends the current cycle, if there is one, and reports the steps that the device has passed.

        Args:
            samples: How many samples the step trained on.
            is_apart: Whether something slowed it down.
            at: The instant of the clock at which it ended; None for now.
        """
        if not self._fetches:
            return
        ended = self._mark() if at is None else at
        phases = None
        if self._stack:
            self._switch("", ended)
            phases = self._sums, self._switches
            self.drop_phases()
        cycle = self._began, self._fetches, self._backward, ended, samples, is_apart, 0, self.labels, phases
        self._began, self._fetches, self._backward, self.labels = ended, [], None, {}
        self.ended += 1
        if self._held is not None:  # of a driver whose steps have no tails
            self._take_held()
        if self.has_tails:
            self._held, self._tail = cycle, [ended]
        else:
            self._take(cycle, ())

    def mark_aside(self) -> None:
        """Begins or ends time that counts neither for the current step nor for its tail, as for a checkpoint."""
        if self._fetches:
            self._fetches.append(self._mark())
        elif self._held is not None:
            self._tail.append(self._mark())

    def tail_ended(self) -> None:
        """Ends the tail of the last step, if it has one, and reports the step."""
        if self._held is not None:
            self._take_held(*self._tail, self._mark())

    def _take_held(self, *tail: Any) -> None:
        cycle, self._held, self._tail = self._held, None, []
        self._take(cycle, tail)

    def steps_ended(self, steps: int, samples: int = 0) -> int:
        """Ends several steps at once. Their cycles are equal parts of the time since the last end.

        Returns:
            How many steps count: 0 after a pause.
        """
        began, self._began = self._began, self._mark()
        labels, self.labels = self.labels, {}
        if began is None:
            return 0
        self.ended += steps
        self._take((began, [began, began], None, self._began, samples, False, steps, labels, None), ())
        return steps

    def pause(self) -> None:
        """Excludes the current gap from the time. Does nothing within a cycle."""
        if not self._fetches:
            self._began = None

    def leave_out(self) -> None:
        """Excludes the time between the last step and now, also if a fetch has begun in it."""
        if len(self._fetches) == 1:
            self._fetches[0], self._began = self._mark(), None
        self.pause()

    def settle(self) -> None:
        """Reports all steps that have ended. Only this call may wait for the device."""
        self.tail_ended()
        if self._pending:
            self.clock.wait_for(self._pending[-1][0])
            self._read_passed()

    # -- phases --------------------------------------------------------------------------------------------------

    def drop_phases(self) -> None:
        """Discards the phases of the current step."""
        self._stack: list[str] = []
        self._switches: list[Switch] = []

    def begin_phases(self, sums: PhaseSums, rest: str) -> None:
        """Has the phases of the current or next step added to ``sums``. The first phase is ``rest``."""
        self._sums, self._stack = sums, [rest]
        self._switches = [Switch(rest, self._mark(), False)]

    @property
    def phase(self) -> str:
        """The phase of the current step; empty if phases are not requested."""
        return self._stack[-1] if self._stack else ""

    def enter(self, phase: str) -> None:
        """Begins a phase. Does nothing if phases are not requested."""
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

    # -- reading -------------------------------------------------------------------------------------------------

    def _keep(self, cycle: Any, tail: Sequence[Any]) -> None:
        self._pending.append((tail[-1] if tail else cycle[3], cycle, tail))
        self._read_passed()

    def _read_passed(self) -> None:
        # All instants are in one stream: if one has passed, all earlier ones have passed too.
        while self._pending and self.clock.has_passed(self._pending[0][0]):
            _, cycle, tail = self._pending.popleft()
            self._read(cycle, tail)
            began, fetches, backward, *_, phases = cycle
            # The end of a cycle is kept, as it is the beginning of the next.
            switched = [] if phases is None else [switch.mark for switch in phases[1][:-1]]
            self.clock.release((*fetches, backward, began, *switched, *tail[1:]))

    def _read(self, cycle: Any, tail: Sequence[Any]) -> None:
        began, fetches, backward, ended, samples, is_apart, together, labels, phases = cycle
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
        tail_took = sum(map(elapsed, tail[1::2], tail[::2])) if tail else 0.0
        # Uses tuple's own constructor: that of a named tuple takes as long as all the rest.
        times = (
            *((took - waited) * ms, cycle_took * ms, waited * ms, before),
            *(samples, together, is_apart, labels, tail_took * ms),
        )
        step = tuple.__new__(StepTimes, times)
        if phases is not None:
            phases[0].add(self.clock, phases[1])
        for told in self.listeners:
            told(step)


class StepTally:
    """Collects the times of the steps that count, in milliseconds. :meth:`took` is the listener.

    For steps that ended together, the share of waiting is that of the latest steps before them.

    Attributes:
        step_ms: One time for each step that was timed by itself, as in ``before_backward_ms``.
        cycle_ms: One time for each step, as in ``wait_ms``.
        labelled_ms: The cycles of steps that have the label :attr:`LABEL`.
        samples: How many samples the steps trained on.
        steps_apart: How many steps do not count; ``samples_apart`` are their samples.
    """

    LABEL = "captured a graph"

    def __init__(self) -> None:
        self.step_ms, self.cycle_ms, self.wait_ms = array("d"), array("d"), array("d")
        self.before_backward_ms, self.labelled_ms = array("d"), array("d")
        self.samples = self.steps_apart = self.samples_apart = 0

    def took(self, step: StepTimes) -> None:
        """Adds the times of a step, or of several that ended together."""
        step_ms, cycle_ms, wait_ms, before_backward_ms, samples, together, is_apart, labels, _ = step
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
        if labels and self.LABEL in labels:
            self.labelled_ms.append(cycle_ms)
