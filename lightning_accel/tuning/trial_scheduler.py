"""The order of live trials: comparisons, one after the other, decide which arms a run has.

First the whole plan is compared with the plain run. Then every arm is: the run with it against the run without it. If
the whole plan has lost, those that can lose little come first. Arms that need a setup come last. Arms that win stay.
Those of a plan that has won stay, too, if they seem to gain. The others are removed, even if they cost nothing. If
nothing is left, and the machine was busy when the plan was too dear to try on, the plan is asked about again. Then the
audit compares the remaining arms with the plain run again. If they are not certainly faster, arms are removed one by
one, in the end all of them. During the rest of the run, an occasional pair of turns, and a new audit if steps have
become slower, keep the promise that the run is never slower than plain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch

from lightning_accel.core.purse import Purse
from lightning_accel.experiment.pair_schedule import Schedule
from lightning_accel.experiment.pair_test import TRIVIAL, PairTest, price_of_memory
from lightning_accel.experiment.screening import DRIFT, LATEST, LatestTimes, screen
from lightning_accel.techniques.arms import OFF, Arm
from lightning_accel.tuning.comparison import ArmComparison, Choices, Result
from lightning_accel.tuning.trial_budget import LEAST_LATEST, Setups, TrialBudget
from lightning_accel.tuning.tuning_result import WHOLE, Tuning

ALPHA = 0.01
"""The rate of false winners: of 100 runs in which nothing is faster than plain, at most one ends with a winner."""

MIN_TURNS = 60
"""The least number of turns. A shorter run is too short for trials: earlier runs or the rules decide for it."""

AUDIT = "audit"
_WATCH_EVERY = 100  # turns of a settled run before its first pair; longer after pairs in a row that plain has lost
_HEAD_START = 50  # turns of a long run with a proven plan before its audit, if the plan is faster in a first test
_ENDLESS = 1e9  # turns
_MAX_PAIRS = 200  # of one comparison, in the longest runs
_MIN_PAIRS = 14  # the fewest that can prove anything, with one bad pair among them
_WHOLE_SHARE, _ARM_SHARE = 0.25, 0.1  # of the remaining turns, for one comparison
_PROMISING_SHARE = 0.5  # the same for a comparison that is about to be won
_CANNOT_STAY = ("out of memory", "raised an error", "needs more memory")  # verdicts that outweigh any gain
_QUIET_LOOKS = 3  # after 16, 32 and 64 turns, whether the machine is less busy than when the whole plan was too dear
_LEAST_GAIN = 0.02  # a share of a step: arms that could gain less are not compared


Course = Generator[ArmComparison | None, Result | None, None]


class Questions:
    """Asks questions about the arms of a run in the form of comparisons. The caller runs their turns."""

    def __init__(
        self,
        arms: Sequence[Arm],
        turns: float,  # the approximate number of turns of the run; infinite if it does not end by itself
        *,
        say: Callable[[str], None],  # receives a line for each decision
        gather: Callable[[Any], list[Any]] | None,  # from one value to those of all ranks; None with one process
        known: Tuning | None,  # the results of earlier trials
        purse: Purse | None = None,  # pays for trials; if None, the length of the run limits them
    ) -> None:
        whole = {arm.name: arm.choices[0] for arm in arms if arm.setup is None and not arm.asked_alone}
        self.tuning = known or Tuning(whole)
        self._is_own = known is not None and not known.is_earlier  # this run's, from before it was resumed or restarted
        self._was_settled = known is not None and known.is_settled
        self._arms = {arm.name: arm for arm in sorted(arms, key=_order)}
        self._setups = Setups(arms, self.tuning, gather)
        seed = torch.initial_seed()
        self._schedule = Schedule(seed if gather is None else gather(seed)[0])
        self._left, self._budget = turns, TrialBudget(turns, purse)
        self._setups.drop_what_pays_later(turns)
        self._sure_gain = self.tuning.sure_gain  # of the steps that are not compared
        self._say = say
        self._latest = LatestTimes()
        self._busy_s = 0.0  # of a plain turn, when the whole plan was asked about

    def _waits_for_money(self) -> bool:
        """Returns whether the run cannot pay for a question yet, but will be able to."""
        return self._left > 2 * MIN_TURNS and self._budget.is_to_come

    def _all_questions(self, is_trusted: bool) -> Course:
        """Yields comparisons one after the other, and None while there is none. Receives the result of each."""
        tuning = self.tuning
        least_turns = max(MIN_TURNS, self._least_turns({}, tuning.choices))
        if self._arms and self._left >= least_turns and not is_trusted:
            is_begun = self._was_settled or (self._is_own and tuning.is_proven)
            yield from self._settled_by(self._later_questions() if is_begun else self._first_questions())
        elif not (self._was_settled or is_trusted):
            is_asked = self._budget.purse is None  # with a purse, arms that the run cannot test must not stay
            self._hold({n: choice for n, choice in tuning.choices.items() if is_asked and not self._arms[n].starts_off})
        while True:
            yield from self._watch()

    def _settled_by(self, questions: Course) -> Course:
        self.tuning.is_settled = False
        self.tuning.of_turns = max(self.tuning.of_turns, min(self._left, _ENDLESS))
        yield from questions
        self.tuning.is_settled = True
        self._say(self.tuning.line())

    def _first_questions(self) -> Course:
        tuning, everything = self.tuning, dict(self.tuning.choices)
        alpha = ALPHA / 2
        if everything:
            whole = yield from self._ask(WHOLE, {}, everything, alpha)
            self._hold(everything if whole.is_won else {}, whole)
        has_won = tuning.is_proven
        if not everything or len(self._arms) > 1 or any(len(arm.choices) > 1 for arm in self._arms.values()):
            arms = list(self._arms.values())
            if everything and not has_won:  # the loss has left little budget, and one of these may earn some
                arms.sort(key=lambda arm: not arm.loses_little)
            yield from self._ask_arms(arms, alpha)
        if everything and not (has_won or tuning.choices):
            refused = {name for name, one in tuning.results.items() if one.verdict in (*_CANNOT_STAY, "not faster")}
            everything = {name: choice for name, choice in everything.items() if name not in refused}
            has_won = yield from self._wins_when_quiet(everything, alpha / 2)
            yield from self._ask_arms(self._arms_of_the_whole() if has_won else [], alpha / 2)
        if has_won and tuning.choices == everything:
            return
        has_failed = any(result.verdict in _CANNOT_STAY for result in tuning.results.values())
        yield from self._audit(everything if has_won and not has_failed else None)

    def _later_questions(self) -> Course:
        """Audits an earlier run's results after a while; then asks the questions that were not asked."""
        held, is_own, is_open = self.tuning.choices, self._is_own, not self._was_settled
        proven = held if self.tuning.is_proven_as_a_whole else None
        if proven is not None and not is_own and self._left >= _HEAD_START + 2 * self._least_turns({}, held):
            first_look = PairTest(ALPHA)
            yield self._comparing("plain", {}, held, first_look, 2, 2)
            for _ in range(_HEAD_START if first_look.is_mostly_faster else 0):
                yield None
        if not is_own:
            yield from self._audit(proven)
        before = dict(self.tuning.choices)
        for unasked in ([*self._new_arms(), *self._setups.unasked()], self._arms_of_the_whole() if is_own else []):
            yield from self._ask_arms(unasked, ALPHA / 8)
        if self.tuning.choices != before and (is_open or not is_own):
            yield from self._audit(before if self.tuning.is_proven else None)

    def _new_arms(self) -> list[Arm]:
        """Returns the arms that were not there earlier, for example because the run could not pay for their trials."""
        results = self.tuning.results
        whole = results[WHOLE].candidate if WHOLE in results else {}
        return [arm for arm in self._unasked() if arm.name not in {**self.tuning.choices, **whole}]

    def _arms_of_the_whole(self) -> list[Arm]:
        """Returns the arms of a plan of several that were compared with the plain run, but not by themselves."""
        whole = self.tuning.results[WHOLE].candidate if WHOLE in self.tuning.results else {}
        return [arm for arm in self._unasked() if arm.name in whole and len(whole) > 1]

    def _unasked(self) -> list[Arm]:
        asked = {name.removeprefix("without ").partition("=")[0] for name in self.tuning.results}
        return [arm for name, arm in self._arms.items() if name not in asked and arm.setup is None]

    def _ask_arms(self, arms: Sequence[Arm], alpha: float) -> Course:
        asked = [(arm, choice) for arm in arms for choice in arm.choices]
        for arm, choice in asked:
            yield from self._ask_arm(arm, choice, alpha / len(asked))

    def _ask_arm(self, arm: Arm, choice: str, alpha: float) -> Course:
        """Compares the run with an arm and without it, or a choice of the arm with the current choice."""
        held = dict(self.tuning.choices)
        without = {name: kept for name, kept in held.items() if name != arm.name}
        with_it = {**without, arm.name: choice}
        is_first = choice == arm.choices[0]
        original = without if is_first else held
        while (arm.setup is not None and len(self._latest) < LEAST_LATEST) or self._waits_for_money():
            yield None
        while (gain_ms := arm.gain_ms()) is None:
            yield None
        if arm.name in self._setups.lost or not arm.has(choice):
            return
        if original == with_it or not self._is_worth_asking(arm, gain_ms, original, with_it):
            return
        if is_first and arm.saves_memory and arm.name in held:
            result = yield from self._ask(f"without {arm.name}", held, without, alpha)
            is_open = result.verdict == "cannot tell" and result.peak_bytes  # not where it has run out of memory
            if result.is_won or (is_open and not price_of_memory(*result.peak_bytes) and result.interval.ratio > 1):
                self._hold(without)
            return
        result = yield from self._ask(_question(arm, choice), original, with_it, alpha)
        # What a proven plan has, it keeps if the better guess is that it gains.
        seems_to_gain = result.verdict == "cannot tell" and math.log(result.interval.ratio) > TRIVIAL
        stays = seems_to_gain and with_it == held and self.tuning.is_proven
        self._hold(with_it if result.is_won or stays else original)

    def _is_worth_asking(self, arm: Arm, gain_ms: float, original: Choices, candidate: Choices) -> bool:
        # An audit may follow, which takes at least as long.
        if not self._budget.is_enough or self._left < 2 * self._least_turns(original, candidate):
            return False
        if not self._setups.is_affordable(arm, self._budget.turns, self._latest):
            return False
        if not self._latest:
            return True
        return max(self._setups.of_all_ranks(gain_ms)) / 1e3 >= _LEAST_GAIN * self._latest.typical_s

    def _audit(self, proven: Choices | None = None) -> Course:
        """Compares the current choices with the plain run. If they do not win, removes their weakest arm, and so on.

        Args:
            proven: The plan that ``tuning.whole`` has shown to be faster. Until it is refuted, it stays if no other
                plan is shown to be faster. If another one loses, it is audited, too.
        """
        while held := dict(self.tuning.choices):
            if proven is not None and held != proven and self._left < self._least_turns({}, held):
                break
            result = yield from self._ask(AUDIT, {}, held, ALPHA / 4)
            if result.is_won:
                self._hold(held, result)
                return
            if proven is not None and result.verdict == "cannot tell":
                break
            if proven is not None and held != proven:  # what is nearly the same has lost: it is asked anew
                self._hold(proven)
                proven = dict(self.tuning.choices)
                continue
            proven = None
            least = min(held, key=self._gain_of)
            self._say(f"{least} is taken back: with it the run was not faster than plain for sure ({result.interval})")
            del held[least]
            self._hold(held, result)
        if proven is not None:
            self._hold(proven)

    def _wins_when_quiet(self, plan: Choices, alpha: float) -> Generator[Any, Any, bool]:
        """Asks about the whole plan again if that was too dear, once plain turns are faster than they were then.

        The machine was busy then. Each repetition is a new test, with half of the error rate of the one before. A win
        puts the plan in force.
        """
        for look in range(_QUIET_LOOKS):
            is_too_dear = self.tuning.results[WHOLE].verdict == "too dear to try on"
            plan = {name: choice for name, choice in plan.items() if name not in self._setups.lost}
            if not (plan and is_too_dear) or LATEST << look > self._left * _ARM_SHARE:
                break
            for _ in range(LATEST << look):
                yield None
            if screen(self._busy_s, self._latest.typical_s, by=DRIFT) == "faster":
                self._hold(plan)
                result = yield from self._ask(WHOLE, {}, plan, alpha)
                self._hold(plan if result.is_won else {}, result)
                if result.is_won:
                    return True
                alpha /= 2
        return False

    def _gain_of(self, name: str) -> float:
        """Returns the factor by which an arm has made the run faster. Each choice was compared with the one before."""
        arm, held = self._arms[name], self.tuning.choices[name]
        results = {choice: self.tuning.results.get(_question(arm, choice)) for choice in arm.choices}
        asked = {choice: result for choice, result in results.items() if result is not None}
        return math.prod(r.interval.ratio for choice, r in asked.items() if r.is_won or choice == held)

    def _watch(self) -> Course:
        """Watches a settled run: runs a pair of turns now and then, and an audit if only its steps became slower."""
        self._latest = LatestTimes()
        test, proven, lost = PairTest(ALPHA), None, 0
        while len(test) < _MAX_PAIRS:
            has_drifted = False
            for turn in range(_WATCH_EVERY * (1 + lost)):
                yield None
                if turn % LATEST == 0 and (has_drifted := self._latest.have_drifted):
                    break
            held = self.tuning.choices
            if not held or self._left < self._least_turns({}, held):  # too few turns are left for an audit
                continue
            if has_drifted:
                proven = held if self.tuning.is_proven_as_a_whole else None
                look = PairTest(ALPHA)
                if proven is not None:
                    yield self._comparing("plain", {}, held, look, 2, 2)
                if not (len(look) == 2 and look.is_mostly_faster):
                    self._say("a step takes longer than it did: what holds is tried against the plain run again")
                    break
                # The plain step seems to take longer, too.
                self._rely_on(min(self._sure_gain, math.exp(min(look.log_ratios))))
                self._latest, proven = LatestTimes(), None
            one_more = len(test) + 1
            result = yield self._comparing("plain", held, {}, test, one_more, one_more)
            assert result is not None
            if result.is_won:
                self._say("the plain run has become faster than what holds, which is tried against it again")
                break
            lost = 0 if test.log_ratios[-1] > 0 else lost + 1
        else:
            return
        yield from self._settled_by(self._audit(proven))
        if proven is not None and self.tuning.results[AUDIT].verdict == "cannot tell":
            self._rely_on(1.0)

    def _note_settled(self, seconds: float | None) -> None:
        if seconds is None:
            return
        self._budget.spend(1 / self._sure_gain - 1)
        self._latest.append(seconds)

    # -- parts -------------------------------------------------------------------------------------------------

    def _ask(self, name: str, original: Choices, candidate: Choices, alpha: float) -> Generator[Any, Any, Result]:
        share = _WHOLE_SHARE if name in (WHOLE, AUDIT) else _ARM_SHARE
        pairs, most = (
            int(min(_MAX_PAIRS, max(_MIN_PAIRS, part * self._left / self._turns_a_pair(original, candidate))))
            for part in (share, _PROMISING_SHARE)
        )
        test = PairTest(alpha)
        result: Result = yield self._comparing(name, original, candidate, test, pairs, most)
        while result.verdict == "too dear to try on" and result.interval.ratio > 1 and self._waits_for_money():
            held = self.tuning.choices
            self._hold(original)
            while self._waits_for_money():
                yield None
            self._hold(held)
            result = yield self._comparing(name, original, candidate, test, pairs, most)
        self.tuning.results[name] = result
        if name == WHOLE:
            self._busy_s = test.original_s
        return result

    def _comparing(
        self, name: str, original: Choices, candidate: Choices, test: PairTest, max_pairs: int, most_pairs: int
    ) -> ArmComparison:
        return ArmComparison(
            name=name,
            original=original,
            candidate=candidate,
            test=test,
            settle=self._settle(original, candidate),
            schedule=self._schedule,
            max_pairs=max_pairs,
            most_pairs=most_pairs,
            allowance=self._budget.of_comparison,
            original_gain=self.tuning.gain if original else 1.0,
            has_setup=self._setups.pending_in(candidate),
        )

    def _settle(self, original: Choices, candidate: Choices) -> int:
        differing = [arm for one, arm in self._arms.items() if original.get(one) != candidate.get(one)]
        sides = (original, candidate)
        steps = [arm.settle_of.get(side.get(arm.name, OFF), arm.settle) for arm in differing for side in sides]
        return max(steps, default=0)

    def _least_turns(self, original: Choices, candidate: Choices) -> float:
        return _MIN_PAIRS * self._turns_a_pair(original, candidate)

    def _turns_a_pair(self, original: Choices, candidate: Choices) -> float:
        settle = self._settle(original, candidate)
        return 2 * (1 + settle) + 1.5 * settle  # half of the pairs begin with the side that ended the pair before

    def _hold(self, choices: Choices, whole: Result | None = None) -> None:
        self.tuning.choices = {name: choice for name, choice in choices.items() if name not in self._setups.lost}
        if whole is not None:
            self.tuning.whole, self.tuning.is_earlier = whole, False
        self._rely_on(self.tuning.sure_gain, self.tuning.gain if self.tuning.is_proven else 1.0)

    def _rely_on(self, sure_gain: float, gain: float | None = None) -> None:
        self._sure_gain = sure_gain
        self._budget.rely_on(gain or sure_gain)


def _question(arm: Arm, choice: str) -> str:
    return arm.name if choice == arm.choices[0] else f"{arm.name}={choice}"


def _order(arm: Arm) -> tuple[bool, bool]:
    """Returns an arm's sort key: what the whole plan leaves out comes after the others, and setups last."""
    return arm.setup is not None, arm.asked_alone
