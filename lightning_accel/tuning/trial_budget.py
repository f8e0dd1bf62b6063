"""The budget of a run for slower ways on trial."""

from __future__ import annotations

from lightning_accel.core.purse import Purse

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

    def spend(self, turns: float) -> None:
        """Records the extra time of turns over plain ones. Negative extra time was saved, and may be spent again."""
        self._own_turns -= turns
        if self.purse is None or self.purse.turn_s is None:
            return
        if turns > 0:
            self.purse.pay("slower ways on trial", turns * self.purse.turn_s)
        else:
            self.purse.earn(-turns * self.purse.turn_s)
