"""Live trials: arms take turns on the run's own training steps, each of which trains.

First the whole plan against the plain run. Then every arm, the one with the most to gain first: the run with it against
the run without it. What has won stays; what has not goes, though it may cost nothing. Last the audit: what is left
against the plain run again; where it is not faster for sure, arms are taken back one by one, and all in the end. While
the run lives, a pair of turns every so often, and a new audit where the time of a step has drifted, keep the promise
that it is never slower than plain.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Any

from lightning_accel.core.peak_memory import PeakMemory
from lightning_accel.techniques.arms import OFF, Arm
from lightning_accel.tuning.comparison import Choices, Comparison, Result, Turn, Verdict
from lightning_accel.tuning.pairs import PairTest
from lightning_accel.tuning.settled import Tuning

ALPHA = 0.01
"""Of 100 runs in which nothing is faster than plain, at most one ends with a winner, over all its arms together."""

MIN_TURNS = 60
"""A run of fewer is over before it could be told what pays: it does what earlier runs or the rules say."""

WATCH_EVERY = 100
"""Turns from one look at a settled run to the next: a pair."""

DRIFT = 1.2
"""A settled step that has become so many times as long is a reason for a new audit."""

WHOLE, AUDIT = "whole plan", "audit"
_GATHERED_EVERY = 8  # turns, by several ranks
_LATEST = 16  # turns, whose median tells of drift
_MAX_PAIRS = 200  # of one comparison, in the longest of runs
_MIN_PAIRS = 14  # that can prove anything, a bad pair among them
_WHOLE_SHARE, _ARM_SHARE = 0.25, 0.1  # of the turns left, that a comparison may take
_PROMISING_SHARE = 0.5  # the same while it is about to be won
_CANNOT_STAY = ("out of memory", "raised an error", "needs more memory")  # whatever it may gain
_LEAST_GAIN = 0.02  # of a step: what could gain less is not asked


def allowance(turns: float) -> float:
    """What slower arms may cost in a run, in turns: 5% of 100 of them, 2% of 1,000 or more."""
    return 0.05 * turns if turns <= 100 else max(0.02 * turns, 5 + (turns - 100) / 60)


Course = Generator[Comparison | None, Result | None, None]


class LiveTrials:
    """Decides which arms a run has, by turns of its own.

    Args:
        arms: What can be switched.
        turns: How many turns the run has, at least about; infinite where it does not end by itself.
        put: Told, before a turn, of what is chosen for it, after the arms have been.
        say: Told of what is decided, in a line each.
        peak: A window on the memory of the device; None where none can be had.
        gather: Maps a value of this process to those of all, in the order of their ranks; None with one process.
        known: What holds by earlier trials.
        is_trusted: Whether it does without an audit: a resumed run's own, say. Else a run that is long enough has one.

    Attributes:
        tuning: What they have come to.
        is_over: Whether the rest of the run is the user's own code: nobody needs to tell of turns any more.
    """

    def __init__(
        self,
        arms: Sequence[Arm],
        turns: float,
        *,
        put: Callable[[Choices], None] = lambda choices: None,
        say: Callable[[str], None] = lambda line: None,
        peak: PeakMemory | None = None,
        gather: Callable[[Any], list[Any]] | None = None,
        known: Tuning | None = None,
        is_trusted: bool = False,
    ) -> None:
        self.tuning = known or Tuning({arm.name: arm.choices[0] for arm in arms})
        self._arms = {arm.name: arm for arm in sorted(arms, key=_gain_ms, reverse=True)}
        self._left, self._allowance = turns, allowance(turns)
        self._put, self._say, self._peak, self._gather = put, say, peak, gather
        self._in_force: dict[str, str] = {arm.name: arm.choices[0] for arm in arms}
        self._pending: deque[tuple[Comparison | None, Turn]] = deque()  # begun, and not timed yet
        self._timed: deque[float | None] = deque()  # what the first of them took, in their order
        self._begun = 0
        self._metered: tuple[Comparison, Turn] | None = None  # whose peak of memory is being looked at
        self._peaks: list[tuple[Comparison, Turn, int]] = []  # not heard of yet
        self._latest: deque[float] = deque(maxlen=_LATEST)
        self._settled_s: float | None = None
        self._has_given_up = False
        self.is_over = False
        self._comparison: Comparison | None = None
        self._course: Course = self._all_questions(is_trusted)  # its first is asked at the first turn

    # -- a turn ------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Puts in force what the turn that now begins is to run with."""
        if self.is_over:
            return
        self._begun += 1
        self._left -= 1
        if self._metered is not None and self._peak is not None:
            self._peaks.append((*self._metered, self._peak.peak_bytes()))
        self._take_up()
        if self._comparison is None:
            self._advance(None)
        turn = Turn(self.tuning.choices) if self._comparison is None else self._comparison.next_turn()
        self._choose(turn.choices)
        self._metered = None
        if self._comparison is None and not turn.choices and self._is_all_decided():
            self.is_over = True
            self._pending.clear()
            return
        self._pending.append((self._comparison, turn))
        if self._comparison is not None and self._peak is not None and turn.pair is None:
            self._metered = self._comparison, turn
            self._peak.restart()

    def took(self, seconds: float | None) -> None:
        """Takes up what the first turn that was not timed yet took; None: something else came in between."""
        self._timed.append(seconds)

    def failed(self, verdict: Verdict) -> bool:
        """Tells that the step of the turn under way raised; whether it was a candidate's, which has lost by that.

        The original is then in force. Several ranks cannot do so, as the others know nothing of it.
        """
        comparison = self._on_trial(side=1)
        if comparison is None:
            return False
        comparison.failed(verdict)
        self._choose(comparison.original)
        self._conclude()
        return True

    def original_failed(self) -> bool:
        """Tells that memory ran out in the turn under way; whether that was the original's: the candidate holds now.

        It may fit where the original does not. Nothing more is asked, as the original would have to run for that.
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

    def _on_trial(self, side: int) -> Comparison | None:
        """What is compared in the turn under way, if that is of this side; not by several ranks."""
        if not self._pending or self._gather is not None:
            return None
        comparison, turn = self._pending[-1]
        return comparison if comparison is self._comparison and turn.side == side else None

    def give_up(self) -> None:
        """Has the rest of the run be the user's own, on all ranks: there is nothing left to switch on this one."""
        self._has_given_up = not self.is_over  # by then, nobody asks
        self.tuning.choices, self.tuning.is_settled = {}, True
        self._in_force = {}
        self._arms, self._comparison, self._course = {}, None, self._nothing_more()

    def _is_all_decided(self) -> bool:
        # All ranks find that at the same turn, one at which they have heard of each other.
        has_heard = self._gather is None or (self._begun % _GATHERED_EVERY == 0 and not self._has_given_up)
        return (self.tuning.is_settled or not self._arms) and has_heard

    def _take_up(self) -> None:
        """Hears what turns took, and held: at once, or every few turns, where ranks have to hear the same."""
        times, peaks = list(self._timed), [peak_bytes for *_, peak_bytes in self._peaks]
        if self._gather is not None:
            if self._begun % _GATHERED_EVERY:
                return
            ranks: list[Any] = self._gather(None if self._has_given_up else (times, peaks))
            if None in ranks:
                self._gather = None
                self._choose({})
                self.give_up()
                return
            # The slowest rank's, of the turns that all have timed, and the most that one of them has held.
            timed, held = zip(*ranks, strict=True)
            times = [None if None in each else max(each) for each in zip(*timed, strict=False)]
            peaks = [max(each) for each in zip(*held, strict=False)]
        for (comparison, turn, _), peak_bytes in zip(self._peaks, peaks, strict=False):
            comparison.peaked(turn, peak_bytes)
        self._peaks.clear()
        for seconds in times:
            self._timed.popleft()
            asking, turn = self._pending.popleft()
            if asking is None:
                self._note_settled(seconds)
            elif not self.tuning.is_settled and seconds is not None:
                self._latest.append(seconds)
            if asking is not None and asking is self._comparison and asking.took(turn, seconds):
                self._conclude()

    def _conclude(self) -> None:
        assert self._comparison is not None
        result = self._comparison.result()
        if result is not None:
            self._allowance -= max(0.0, self._comparison.cost)
            self._advance(result)

    def _advance(self, result: Result | None) -> None:
        self._comparison = next(self._course) if result is None else self._course.send(result)

    def _choose(self, choices: Choices) -> None:
        if choices == self._in_force:
            return
        for name, arm in self._arms.items():
            wanted = choices.get(name, OFF)
            if self._in_force.get(name, OFF) != wanted:
                arm.choose(wanted)
        self._in_force = dict(choices)
        self._put(choices)

    def _nothing_more(self) -> Course:
        while True:
            yield None

    # -- what is asked -----------------------------------------------------------------------------------------

    def _all_questions(self, is_trusted: bool) -> Course:
        """Yields one comparison after the other, is sent how each ended, and yields None while there is none."""
        tuning = self.tuning
        least_turns = max(MIN_TURNS, self._least_turns({}, tuning.choices))
        if self._arms and self._left >= least_turns and not is_trusted:
            proven = tuning.choices if tuning.is_proven else None
            yield from self._settled_by(self._audit(proven) if tuning.is_settled else self._first_questions())
        while True:
            yield from self._watch()

    def _settled_by(self, questions: Course) -> Course:
        self.tuning.is_settled = False
        yield from questions
        self.tuning.is_settled = True
        self._say(self.tuning.line())

    def _first_questions(self) -> Course:
        tuning, everything = self.tuning, dict(self.tuning.choices)
        alpha = ALPHA / 2
        whole = yield from self._ask(WHOLE, {}, everything, alpha)
        self._hold(everything if whole.is_won else {}, whole)
        if len(self._arms) > 1 or any(len(arm.choices) > 1 for arm in self._arms.values()):
            asked = [(arm, choice) for arm in self._arms.values() for choice in arm.choices]
            for arm, choice in asked:
                yield from self._ask_arm(arm, choice, alpha / len(asked))
        if whole.is_won and tuning.choices == everything:
            return
        has_failed = any(result.verdict in _CANNOT_STAY for result in tuning.results.values())
        yield from self._audit(everything if whole.is_won and not has_failed else None)

    def _ask_arm(self, arm: Arm, choice: str, alpha: float) -> Course:
        """The run with an arm against the run without it, or a choice of it against the one that holds."""
        held = dict(self.tuning.choices)
        without = {name: kept for name, kept in held.items() if name != arm.name}
        with_it = {**without, arm.name: choice}
        is_first = choice == arm.choices[0]
        original = without if is_first else held
        if original == with_it or not self._is_worth_asking(arm, original, with_it):
            return
        if is_first and arm.saves_memory and arm.name in held:
            result = yield from self._ask(f"without {arm.name}", held, without, alpha)
            if result.is_won:
                self._hold(without)
            return
        result = yield from self._ask(_question(arm, choice), original, with_it, alpha)
        self._hold(with_it if result.is_won else original)

    def _is_worth_asking(self, arm: Arm, original: Choices, candidate: Choices) -> bool:
        # An audit may follow, which takes as long at least.
        if self._allowance <= 0 or self._left < 2 * self._least_turns(original, candidate):
            return False
        if arm.gain_ms is None or not self._latest:
            return True
        return arm.gain_ms / 1e3 >= _LEAST_GAIN * statistics.median(self._latest)

    def _audit(self, proven: Choices | None = None) -> Course:
        """What holds against the plain run; where it has not won, without its least arm, until nothing is left.

        Args:
            proven: The plan that ``tuning.whole`` has shown to be faster. While it is not refuted, it holds where
                nothing else can be shown to be.
        """
        while held := dict(self.tuning.choices):
            if proven is not None and held != proven and self._left < self._least_turns({}, held):
                break
            result = yield from self._ask(AUDIT, {}, held, ALPHA / 4)
            if result.is_won:
                self._hold(held, result)
                return
            if proven is not None:
                if held != proven or result.verdict == "cannot tell":
                    break
                proven = None
            least = min(held, key=self._gain_of)
            self._say(f"{least} is taken back: with it the run was not faster than plain for sure ({result.interval})")
            del held[least]
            self._hold(held, result)
        if proven is not None:
            self._hold(proven)

    def _gain_of(self, name: str) -> float:
        """How many times as fast an arm has made the run: a choice of it was compared with the one that held before."""
        arm, held = self._arms[name], self.tuning.choices[name]
        results = {choice: self.tuning.results.get(_question(arm, choice)) for choice in arm.choices}
        asked = {choice: result for choice, result in results.items() if result is not None}
        return math.prod(r.interval.ratio for choice, r in asked.items() if r.is_won or choice == held)

    def _watch(self) -> Course:
        """A settled run: nothing for a while, then a pair, or an audit where a step takes longer than it did."""
        self._latest.clear()
        self._settled_s = None
        test = PairTest(ALPHA)
        while len(test) < _MAX_PAIRS:
            has_drifted = False
            for turn in range(WATCH_EVERY):
                yield None
                if turn % _LATEST == 0 and (has_drifted := self._has_drifted()):
                    break
            held = self.tuning.choices
            if not held or self._left < self._least_turns({}, held):  # no audit could end any more
                continue
            if has_drifted:
                self._say("a step takes longer than it did: what holds is tried against the plain run again")
                break
            one_more = len(test) + 1
            result = yield self._comparing("plain", held, {}, test, one_more, one_more)
            assert result is not None
            if result.is_won:
                self._say("the plain run has become faster than what holds, which is tried against it again")
                break
        else:
            return
        yield from self._settled_by(self._audit())

    def _note_settled(self, seconds: float | None) -> None:
        if seconds is None:
            return
        self._latest.append(seconds)
        if self._settled_s is None and len(self._latest) == _LATEST:
            self._settled_s = statistics.median(self._latest)

    def _has_drifted(self) -> bool:
        return self._settled_s is not None and statistics.median(self._latest) > DRIFT * self._settled_s

    # -- parts -------------------------------------------------------------------------------------------------

    def _ask(self, name: str, original: Choices, candidate: Choices, alpha: float) -> Generator[Any, Any, Result]:
        share = _WHOLE_SHARE if name in (WHOLE, AUDIT) else _ARM_SHARE
        pairs, most = (
            int(min(_MAX_PAIRS, max(_MIN_PAIRS, part * self._left / self._turns_a_pair(original, candidate))))
            for part in (share, _PROMISING_SHARE)
        )
        result: Result = yield self._comparing(name, original, candidate, PairTest(alpha), pairs, most)
        self.tuning.results[name] = result
        return result

    def _comparing(
        self, name: str, original: Choices, candidate: Choices, test: PairTest, max_pairs: int, most_pairs: int
    ) -> Comparison:
        return Comparison(
            name,
            original,
            candidate,
            settle=self._settle(original, candidate),
            test=test,
            max_pairs=max_pairs,
            most_pairs=most_pairs,
            allowance=max(0.0, self._allowance / 2),
            original_gain=self._gain() if original else 1.0,
        )

    def _settle(self, original: Choices, candidate: Choices) -> int:
        differing = [arm for one, arm in self._arms.items() if original.get(one) != candidate.get(one)]
        return max((arm.settle for arm in differing), default=0)

    def _least_turns(self, original: Choices, candidate: Choices) -> float:
        return _MIN_PAIRS * self._turns_a_pair(original, candidate)

    def _turns_a_pair(self, original: Choices, candidate: Choices) -> float:
        settle = self._settle(original, candidate)
        return 2 * (1 + settle) + 1.5 * settle  # half of the pairs begin with the side that the last one ended with

    def _gain(self) -> float:
        """How many times as fast as a plain run what holds is, as far as known."""
        whole = self.tuning.whole
        return max(1.0, whole.interval.ratio) if whole is not None and self.tuning.choices else 1.0

    def _hold(self, choices: Choices, whole: Result | None = None) -> None:
        self.tuning.choices = dict(choices)
        if whole is not None:
            self.tuning.whole, self.tuning.is_earlier = whole, False


def _question(arm: Arm, choice: str) -> str:
    return arm.name if choice == arm.choices[0] else f"{arm.name}={choice}"


def _gain_ms(arm: Arm) -> float:
    return float("inf") if arm.gain_ms is None else arm.gain_ms
