"""Live trials: arms take turns on the run's own training steps. Each of these steps trains.

:mod:`lightning_accel.tuning.trial_scheduler` decides which question comes next. This module runs the turns: the choices
of each turn, the turns that count, and the switches between turns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from lightning_accel.core.peak_memory import PeakMemory
from lightning_accel.core.purse import Purse
from lightning_accel.techniques.arms import OFF, Arm
from lightning_accel.tuning.comparison import ArmComparison, Choices, Result, Turn, Verdict
from lightning_accel.tuning.trial_scheduler import Course, Questions
from lightning_accel.tuning.tuning_result import Tuning

_GATHERED_EVERY = 8  # turns between two exchanges of several ranks
_UNCLEAR_PAIRS = 28  # of a comparison that goes on: the difference is a small one


class LiveTrials(Questions):
    """Decides which arms a run has, from the times of its turns."""

    def __init__(
        self,
        arms: Sequence[Arm],
        turns: float,
        *,
        put: Callable[[Choices], None] = lambda choices: None,  # receives a turn's choices, after the arms were set
        say: Callable[[str], None] = lambda line: None,
        peak: PeakMemory | None = None,  # measures the device's peak memory, if that is possible
        gather: Callable[[Any], list[Any]] | None = None,
        known: Tuning | None = None,
        is_trusted: bool = False,  # whether ``known`` needs no audit, such as a resumed run's own results
        purse: Purse | None = None,
    ) -> None:
        super().__init__(arms, turns, say=say, gather=gather, known=known, purse=purse)
        self._set_up: Turn | None = None  # the turn in which an arm is set up
        self._put, self._peak, self._gather = put, peak, gather
        self._in_force: dict[str, str] = {
            arm.name: arm.choices[0] for arm in arms if arm.setup is None and not arm.starts_off
        }
        self._pending: deque[tuple[ArmComparison | None, Turn]] = deque()  # begun, but not evaluated yet
        self._timed: deque[float | None] = deque()  # the times of the first of these, in order
        self._begun = 0
        self._metered: tuple[ArmComparison, Turn] | None = None  # the turn whose peak memory is being measured
        self._peaks: list[tuple[ArmComparison, Turn, int]] = []  # not evaluated yet
        self._has_given_up = False
        self._lost: list[str] = []  # arms that this rank has lost, and of which the others do not know yet
        self.is_over = False  # whether the rest of the run is the user's own code and needs no turns
        self._comparison: ArmComparison | None = None
        self._course: Course = self._all_questions(is_trusted)  # starts at the first turn

    # -- a turn ------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Applies the choices of the next turn."""
        if self.is_over:
            return
        self._begun += 1
        self._left -= 1
        if self._metered is not None and self._peak is not None:
            self._peaks.append((*self._metered, self._peak.peak_bytes()))
        if self._setups.are_under_way:
            self._end_setups()
        self._take_up()
        if self._comparison is None:
            self._advance(None)
        turn = Turn(self.tuning.choices) if self._comparison is None else next(self._comparison.turns)
        self._choose(turn.choices)
        self._set_up = turn if self._setups.are_under_way else self._set_up
        self._metered = None
        if self._comparison is None and not turn.choices and self._is_all_decided():
            self.is_over = True
            self._pending.clear()
            return
        self._pending.append((self._comparison, turn))
        if self._comparison is not None and self._peak is not None and self._comparison.needs_peak(turn):
            self._metered = self._comparison, turn
            self._peak.restart()

    def took(self, seconds: float | None) -> None:
        """Adds the time of the first turn without one. ``seconds`` is None if that turn was interrupted."""
        self._timed.append(seconds)

    def failed(self, verdict: Verdict) -> bool:
        """Ends the comparison if its candidate's step raised an error. Returns whether it was the candidate's step.

        The original is then in force. With several ranks this is impossible, since the other ranks do not know.
        """
        comparison = self._on_trial(side=1)
        if comparison is None:
            return False
        comparison.failure = verdict
        self._choose(comparison.original)
        self._conclude()
        return True

    def original_failed(self) -> bool:
        """Ends the comparison, and keeps the candidate, if the original ran out of memory. Returns whether it did.

        The candidate may fit where the original does not. No more questions follow: the original would have to run.
        """
        comparison = self._on_trial(side=0)
        more = {} if comparison is None else dict(comparison.candidate.items() - comparison.original.items())
        if comparison is None or not more:
            return False
        self._hold(comparison.candidate)
        self.tuning.is_settled = True
        self._comparison, self._course = None, self._nothing_more()
        self._choose(self.tuning.choices)
        self._say(f"out of memory without {', '.join(more)}, so that nothing is tried without any more")
        return True

    def _on_trial(self, side: int) -> ArmComparison | None:
        """Returns the comparison of the current turn if the turn is of this side; None on several ranks."""
        if not self._pending or self._gather is not None:
            return None
        comparison, turn = self._pending[-1]
        return comparison if comparison is self._comparison and turn.side == side else None

    @property
    def can_be_left(self) -> bool:
        """Whether no comparison would be lost now that may still show much."""
        pairs = 0 if self._comparison is None else len(self._comparison.test)
        return pairs == 0 or pairs >= _UNCLEAR_PAIRS

    def lose(self, name: str) -> None:
        """Removes an arm for the rest of the run. It is off already; a comparison that contains it ends.

        On several ranks, all of them lose it when they next exchange times: until then, they take the same turns.
        """
        if self._gather is not None and not self.is_over:
            self._lost.append(name)
        else:
            self._lose(name)

    def _lose(self, name: str) -> None:
        arm = self._arms.pop(name, None)
        if arm is None:
            return
        if name in self._in_force and self._gather is not None and name not in self._lost:  # another rank has lost it
            arm.choose(OFF)
            self._put({one: choice for one, choice in self._in_force.items() if one != name})
        self._is_own = False  # the plan without this arm was not measured
        self._setups.lost.add(name)
        self._in_force.pop(name, None)
        self._hold(self.tuning.choices)
        comparison = self._comparison
        if comparison is not None and name in {**comparison.original, **comparison.candidate}:
            self._choose(self.tuning.choices)
            self._pending = deque((None if asking is comparison else asking, turn) for asking, turn in self._pending)
            self._comparison, self._course = None, self._all_questions(is_trusted=False)

    def give_up(self) -> None:
        """Ends the trials: this rank has nothing left to switch, and the rest of the run is plain.

        On several ranks, all of them end when they next exchange times: until then, they take the same turns.
        """
        if self._gather is not None and not self.is_over:  # once it is over, no rank asks
            self._has_given_up = True
            return
        self._hold({})
        self.tuning.is_settled, self._in_force = True, {}
        self._arms, self._comparison, self._course = {}, None, self._nothing_more()

    def end(self, revert: Callable[[str], object]) -> None:
        """Ends the trials after an error of ours, with all arms off. ``revert`` gets those that stay on."""
        for name, arm in self._arms.items():
            try:
                arm.choose(OFF)
            except Exception:
                revert(name)
        self._put({})
        self.give_up()
        self.is_over = True

    def _is_all_decided(self) -> bool:
        # All ranks find this out at the same turn, one at which they exchange times.
        has_heard = self._gather is None or (self._begun % _GATHERED_EVERY == 0 and not self._has_given_up)
        return (self.tuning.is_settled or not self._arms) and has_heard

    def _take_up(self) -> None:
        """Evaluates the times and the memory of turns: at once, or every few turns if ranks have to agree."""
        times, peaks = list(self._timed), [peak_bytes for *_, peak_bytes in self._peaks]
        if self._gather is not None:
            if self._begun % _GATHERED_EVERY:
                return
            ranks: list[Any] = self._gather(None if self._has_given_up else (times, peaks, self._lost))
            if None in ranks:
                self._choose({})
                self._gather = None
                self.give_up()
                return
            # Over all ranks: the longest time of each turn that all have timed, and the largest peak memory.
            timed, held, lost = zip(*ranks, strict=True)
            times = [None if None in each else max(each) for each in zip(*timed, strict=False)]
            peaks = [max(each) for each in zip(*held, strict=False)]
            for name in dict.fromkeys(name for each in lost for name in each):
                self._lose(name)
            self._lost = []
        for (comparison, turn, _), peak_bytes in zip(self._peaks, peaks, strict=False):
            comparison.peaked(turn, peak_bytes)
        self._peaks.clear()
        for seconds in times:
            self._timed.popleft()
            asking, turn = self._pending.popleft()
            seconds = None if turn is self._set_up else seconds
            if (purse := self._budget.purse) is not None and seconds is not None and not turn.choices:
                purse.step_took(seconds / purse.steps_a_turn)  # replaces the times of the first, perhaps slow, steps
            if asking is None:
                self._note_settled(seconds)
            elif not self.tuning.is_settled and seconds is not None:
                self._latest.append(seconds)
            if asking is not None and asking is self._comparison and asking.took(turn, seconds):
                self._budget.spend(asking.charge())
                self._conclude()

    def _conclude(self) -> None:
        assert self._comparison is not None
        result = self._comparison.result()
        if result is not None:
            self._setups.note_gain(result, self._comparison.test.gain_s)
            self._advance(result)

    def _end_setups(self) -> None:
        seconds = self._setups.end()
        if self._latest:  # otherwise an earlier run's plan was set up, which is not charged as a trial
            self._budget.spend(seconds / self._latest.typical_s)
        if self._comparison is not None and self._comparison.name.partition("=")[0] in self._setups.lost:
            self._comparison.failure = "refused in its trial"
            self._conclude()
        self._hold(self.tuning.choices)

    def _advance(self, result: Result | None) -> None:
        self._comparison = next(self._course) if result is None else self._course.send(result)

    def _choose(self, choices: Choices) -> None:
        if choices == self._in_force:
            return
        for name, arm in self._arms.items():
            wanted = choices.get(name, OFF)
            if self._in_force.get(name, OFF) != wanted:
                self._setups.begin(arm, wanted)
                arm.choose(wanted)
        self._in_force = dict(choices)
        self._put(choices)

    def _nothing_more(self) -> Course:
        while True:
            yield None
