"""Turns of live trials: groups the steps of a training into turns, decides which turns count, and times them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from lightning_accel.core.step_timeline import Driver, StepTimeline, StepTimes
from lightning_accel.tuning.trials import LiveTrials

_WHOLE = 0.9  # of the elements of the turn before: a smaller turn at the end of an epoch is an incomplete one


@dataclass
class _Turn:
    """The time from one optimizer step to the next; each of its batches is a step of the timeline."""

    untimed: int = 0  # batches whose time is not known yet
    seconds: float = 0.0
    elements: int = 0  # of the tensors in its batches
    repeats: int = 0  # turns in a row that did not count
    ends_epoch: bool = False
    is_interrupted: bool = False
    is_over: bool = False


class Turns:
    r"""Cuts a training into turns for live trials. Before the trials begin, it costs almost nothing.

    It listens to the timeline of a training. A Trainer and a plain loop differ in this:

    * A Trainer's step has a tail, up to the end of ``on_train_batch_end``, without fetches and checkpoints. A plain
    loop's step lasts from one beginning to the next, with all of these.
    * A Trainer's turn is the batches whose gradients are accumulated; its time is scaled as if every turn had as many
    elements as the first. A plain loop's turn is one step, and its batches are assumed to be equally large.
    * In a Trainer with a single rank, a turn that does not count is repeated. Several ranks may disagree on this.
    """

    def __init__(self, timeline: StepTimeline) -> None:
        self.trials: LiveTrials | None = None  # None before `start`
        self._timeline = timeline
        self._repeats = 0
        self._turn = _Turn()
        self._unheard: deque[_Turn] = deque()  # turns, in order, whose times the trials do not know yet
        self._elements = 0  # of the latest turn that counts
        self._typical_elements = 0

    def start(self, trials: LiveTrials, *, repeats: int = 0) -> None:
        """Begins ``trials`` with the next turn. A turn that does not count is repeated up to ``repeats`` times."""
        self.trials, self._repeats = trials, repeats
        self._timeline.listeners.append(self._took)
        self._timeline.has_tails = True

    def stop(self) -> None:
        """Stops listening to the timeline."""
        if self._took in self._timeline.listeners:
            self._timeline.tail_ended()
            self._timeline.has_tails = False
            self._timeline.release(self)
            self._timeline.forget(self._took)

    @property
    def are_taken(self) -> bool:
        """Whether there are trials that are not over."""
        return self.trials is not None and not self.trials.is_over

    def step_begins(self, elements: int = 0, *, ends_epoch: bool = False) -> None:
        """Begins a step, with a batch of this many elements, perhaps the last one of an epoch."""
        self._timeline.claim(self, Driver.TURNS)  # which a driver above may have released
        self._timeline.step_began()
        if (unreported := self._timeline.labels.get(self)) is not None:  # a step that nobody has ended
            unreported.is_interrupted = True
            unreported.untimed -= 1
        self._timeline.labels[self] = self._turn
        self._turn.untimed += 1
        self._turn.elements += elements
        self._turn.ends_epoch |= ends_epoch

    def step_ends(self) -> None:
        """Ends the current step, if there is one."""
        if self._timeline.driver is self:
            self._timeline.step_ended()
        self._timeline.tail_ended()

    def interrupt(self) -> None:
        """Marks the turn as not counting if other work than training is being timed as part of a step."""
        self._turn.is_interrupted |= self._timeline.is_in_step

    def next_turn(self) -> None:
        """Ends the current turn, tells the trials of the turns whose time is known, and begins the next one."""
        assert self.trials is not None, "start() comes first"
        turn = self._turn
        turn.is_over = True
        if turn.ends_epoch and turn.elements < _WHOLE * self._elements:  # fixed costs are a larger part of its time
            turn.is_interrupted = True
        if not turn.is_interrupted:
            self._elements = turn.elements
        elif self._unheard and turn.repeats < self._repeats:
            # Otherwise, with epochs of two steps, every pair might lack the same side.
            self._unheard[-1] = self._turn = _Turn(repeats=turn.repeats + 1)
            return
        while self._unheard and self._unheard[0].is_over and not self._unheard[0].untimed:
            self._tell(self.trials, self._unheard.popleft())
        self._turn = _Turn()
        self.trials.begin()
        self._unheard.append(self._turn)
        if self.trials.is_over:
            self.stop()

    def _took(self, step: StepTimes) -> None:
        turn: _Turn | None = step.labels.get(self)
        if turn is not None:
            turn.seconds += (step.step_ms + step.tail_ms) / 1e3
            turn.untimed -= 1

    def _tell(self, trials: LiveTrials, turn: _Turn) -> None:
        if turn.is_interrupted or turn.seconds <= 0:  # 0 if all clocks are stopped, as by freezegun
            trials.took(None)
            return
        self._typical_elements = self._typical_elements or turn.elements
        trials.took(turn.seconds * (self._typical_elements / turn.elements if turn.elements else 1.0))
