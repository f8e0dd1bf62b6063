"""What trials cost a run: its budget for slower ways, and the setups of arms that it can afford."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from lightning_accel.core.purse import Purse
from lightning_accel.experiment.screening import LatestTimes
from lightning_accel.techniques.arms import OFF, Arm
from lightning_accel.tuning.comparison import Choices, Result
from lightning_accel.tuning.tuning_result import WHOLE, Tuning

T = TypeVar("T")

LEAST_LATEST = 3  # timed turns that are needed to convert between seconds and turns
_LEAST = 0.3  # turns that a comparison may cost if a purse pays: with fewer, a single hiccup would decide


def allowance(turns: float) -> float:
    """Returns the turns that slower arms may cost a run: 5% of 100 turns, 2% of 1,000 turns or more."""
    return 0.05 * turns if turns <= 100 else max(0.02 * turns, 5 + (turns - 100) / 60)


class TrialBudget:
    """The budget in turns of the plain run: from the run's purse, or from the run's length."""

    def __init__(self, turns: float, purse: Purse | None) -> None:
        self.purse, self._own_turns = purse, allowance(turns)

    @property
    def turns(self) -> float:
        """Returns the turns that slower arms may still cost this run."""
        if self.purse is None or self.purse.turn_s is None:
            return self._own_turns
        return self.purse.left_s / self.purse.turn_s

    @property
    def of_comparison(self) -> float:
        """Returns the turns that one comparison may cost: half of the rest, as an audit may follow."""
        return max(0.0 if self.purse is None else _LEAST, self.turns / 2)

    @property
    def is_enough(self) -> bool:
        """Whether the budget covers the possible cost of a comparison."""
        return self.turns > (0.0 if self.purse is None else 1.0)

    @property
    def is_to_come(self) -> bool:
        """Whether the run cannot pay for a comparison yet, but will be able to."""
        if self.purse is None or self.purse.turn_s is None or self.turns >= 1:
            return False
        return self.purse.to_come_s > self.purse.turn_s

    def rely_on(self, gain: float) -> None:
        """Sets the speed, as a multiple of the plain run's, that the steps from now on are expected to have."""
        if self.purse is not None:
            self.purse.saved_share = 1 - 1 / gain

    def spend(self, turns: float) -> None:
        """Records the extra time of turns over plain ones. Negative extra time was saved, and may be spent again."""
        self._own_turns -= turns
        if self.purse is None or self.purse.turn_s is None:
            return
        if turns > 0:
            self.purse.pay("slower ways on trial", turns * self.purse.turn_s)
        else:
            self.purse.earned_s -= turns * self.purse.turn_s


class Setups:
    """The setups of one run's arms: :class:`~lightning_accel.techniques.arms.ArmSetup`."""

    def __init__(self, arms: Iterable[Arm], tuning: Tuning, gather: Callable[[Any], list[Any]] | None) -> None:
        self._arms = {arm.name: arm for arm in arms if arm.setup is not None}
        self._tuning, self._gather = tuning, gather
        self._begun: set[str] = set()
        self._under_way: list[str] = []
        self.lost: set[str] = set()  # arms whose setup failed
        self.may_take_s = math.inf  # the limit of the next setup; an earlier run's proven plan has no limit

    @property
    def are_under_way(self) -> bool:
        """Whether the turn that begins contains a setup, so that it must not count."""
        return bool(self._under_way)

    def unasked(self) -> list[Arm]:
        """Returns the arms without a comparison so far."""
        return [arm for name, arm in self._arms.items() if name not in self._tuning.results]

    def pending_in(self, choices: Choices) -> bool:
        """Returns whether a run with these choices begins with a setup."""
        return any(name in self._arms and name not in self._begun for name in choices)

    def is_affordable(self, arm: Arm, allowance: float, latest: LatestTimes) -> bool:
        """Returns whether the run can afford the expected time of the arm's setup; ``allowance`` is in turns."""
        if arm.setup is None or arm.name in self._begun:
            return True
        expected_s = self._tuning.setup_s.get(arm.name) or max(self.of_all_ranks(arm.setup.expected_s()))
        self.may_take_s = allowance * latest.typical_s
        if expected_s <= self.may_take_s:
            return True
        arm.setup.decline(
            f"not tried: it would take about {expected_s:.0f} s, and trials may cost this run {self.may_take_s:.1f} s"
        )
        return False

    def drop_what_pays_later(self, turns: float) -> None:
        """Removes arms of an earlier run's plan that recover their setup time only after more than ``turns`` turns."""
        tuning = self._tuning
        for name in list(tuning.choices):
            pays_after = tuning.pays_after(name)
            if pays_after is None or pays_after <= turns:
                continue
            del tuning.choices[name]
            if name in self._arms and (setup := self._arms[name].setup) is not None:
                setup.decline(f"not here: it pays after {pays_after:,} steps")
            # The comparison of the whole plan does not include such arms.
            whole = tuning.results.get(WHOLE)
            tuning.whole = whole if tuning.choices and whole is not None and whole.is_won else None

    def begin(self, arm: Arm, choice: str) -> None:
        """Begins the setup of an arm before the arm is chosen for the first time."""
        if choice != OFF and arm.name in self._arms and arm.name not in self._begun:
            assert arm.setup is not None
            self._begun.add(arm.name)
            self._under_way.append(arm.name)
            arm.setup.begin(self.may_take_s)
            self.may_take_s = math.inf

    def end(self) -> float:
        """Ends the running setups between two steps. Returns their total seconds, each on its slowest rank."""
        total = 0.0
        for name in self._under_way:
            setup = self._arms[name].setup
            assert setup is not None
            taken = self.of_all_ranks(setup.end())
            seconds = max(one or 0.0 for one in taken)
            self._tuning.setup_s[name] = seconds
            total += seconds
            if None in taken:  # an arm that one rank lacks is tried by none
                self.lost.add(name)
        self._under_way.clear()
        return total

    def note_gain(self, result: Result, gain_s: float) -> None:
        """Adds the gain of a won comparison, in seconds for a turn. Another choice of an arm adds to the first one."""
        name, _, choice = result.name.partition("=")
        if name in self._arms and result.is_won:
            first = self._tuning.results.get(name)
            held = self._tuning.gain_s.get(name, 0.0) if choice and first is not None and first.is_won else 0.0
            self._tuning.gain_s[name] = held + gain_s

    def of_all_ranks(self, value: T) -> list[T]:
        """Returns this rank's value and those of all others, in their order."""
        return [value] if self._gather is None else self._gather(value)
