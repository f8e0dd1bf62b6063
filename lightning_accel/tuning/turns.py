"""Turns of live trials: groups the steps of a training into turns, decides which turns count, and times them.

:class:`LoopTuning` has them in a plain PyTorch loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from lightning_accel.core.clocks import clock_for
from lightning_accel.core.ranks import has_ranks
from lightning_accel.core.report import one_line
from lightning_accel.core.step_timeline import Driver, StepTimeline, StepTimes
from lightning_accel.core.user_frames import is_for_the_user
from lightning_accel.engine import Engine
from lightning_accel.techniques.arms import OFF, Arm
from lightning_accel.tuning.comparison import Choices
from lightning_accel.tuning.trials import LiveTrials
from lightning_accel.tuning.tuning_result import Tuning

_QUIET_STEPS = 2  # steps after the techniques' own trials, in which caches fill
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

    Attributes:
        trials: The trials; None before :meth:`start`.
        have_failed: Whether an error of this library's own has ended the trials.
    """

    def __init__(self, timeline: StepTimeline) -> None:
        self.trials: LiveTrials | None = None
        self.have_failed = False
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

    def end_after(self, error: Exception, engine: Engine) -> None:
        """Ends the trials, with all arms off, after an error of this library's own. Raises any other error."""
        if is_for_the_user(error) or has_ranks():  # other ranks would wait for this one
            raise error
        self.have_failed = True
        self.stop()
        reason = f"between two steps, this library raised {one_line(error)}"
        if self.trials is None:
            set_choices(engine, engine.arms(), {})
        else:
            self.trials.end(lambda name: engine.revert_all(reason, name))
        record = engine.report.of("tuning")
        record.is_on, record.status = False, reason
        engine.degrade(f"{reason}: it tries nothing more")

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


def set_choices(
    engine: Engine, arms: Sequence[Arm], choices: Choices, pauses: Callable[[str], bool] = lambda name: False
) -> None:
    """Applies settled choices in a run without live trials, such as an evaluation."""
    for arm in arms:
        arm.choose(choices.get(arm.name, OFF))
    engine.disable((arm.name for arm in arms if arm.name not in choices), pauses=pauses)
    engine.report.settled({arm.name for arm in arms} - choices.keys())


class LoopTuning:
    """Runs live trials of an engine's arms in a loop of about ``steps`` steps."""

    def __init__(self, engine: Engine, device: torch.device, steps: int) -> None:
        self._engine, self._steps_left = engine, steps
        self._quiet_steps = 0
        self._is_closed = False
        self._turns = Turns(StepTimeline(clock_for(device)))

    @property
    def tuning(self) -> Tuning | None:
        """Returns the results of the trials; None before they began."""
        return None if self._turns.trials is None else self._turns.trials.tuning

    def step_begins(self) -> None:
        """Ends the current turn, and begins the next one."""
        self._steps_left -= 1
        turns = self._turns
        if self._is_closed or turns.have_failed or (turns.trials is not None and not turns.are_taken):
            return
        if self._engine.is_trying or self._quiet_steps < _QUIET_STEPS:
            self._quiet_steps += not self._engine.is_trying
            return
        try:
            if turns.trials is None:
                turns.start(self._trials())
            turns.step_ends()
            turns.next_turn()
            turns.step_begins()
        except Exception as error:
            turns.end_after(error, self._engine)

    def interrupt(self) -> None:
        """Excludes the current turn, since other work than training follows."""
        self._turns.interrupt()

    def close(self) -> None:
        """Ends the trials: nothing is switched any more."""
        self._is_closed = True

    def _trials(self) -> LiveTrials:
        # A deterministic run bases no decision on time measurements.
        arms = [] if torch.are_deterministic_algorithms_enabled() else self._engine.arms()

        def put(choices: Choices) -> None:
            self._engine.disable((arm.name for arm in arms if arm.name not in choices), pauses=lambda name: not choices)

        return LiveTrials(arms, self._steps_left, put=put, say=self._say)

    def _say(self, line: str) -> None:
        if self.tuning is not None:
            self.tuning.show_in(self._engine.report.of("tuning"))
