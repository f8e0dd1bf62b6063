"""What slower ways on trial may still cost a run."""

from __future__ import annotations

from lightning_accel.core.purse import Purse

_LEAST = 0.3  # turns, that a comparison may cost where a purse pays: of less, a single hiccup would decide


def allowance(turns: float) -> float:
    """The turns that slower arms may cost in a run: 5% of 100 turns, 2% of 1,000 turns or more."""
    return 0.05 * turns if turns <= 100 else max(0.02 * turns, 5 + (turns - 100) / 60)


class TrialBudget:
    """Counts in turns of the plain run: those of the run's purse, or those that its length allows."""

    def __init__(self, turns: float, purse: Purse | None) -> None:
        self.purse, self._own_turns = purse, allowance(turns)

    @property
    def turns(self) -> float:
        """The turns that slower arms may still cost this run."""
        if self.purse is None or self.purse.turn_s is None:
            return self._own_turns
        return self.purse.left_s / self.purse.turn_s

    @property
    def of_comparison(self) -> float:
        """Those that one comparison may cost: half, as an audit may follow."""
        return max(0.0 if self.purse is None else _LEAST, self.turns / 2)

    @property
    def is_enough(self) -> bool:
        """Whether there is as much as a question may cost before its answer is known."""
        return self.turns > (0.0 if self.purse is None else 1.0)

    @property
    def is_to_come(self) -> bool:
        """Whether the run cannot pay for a question yet, but will be able to."""
        if self.purse is None or self.purse.turn_s is None or self.turns >= 1:
            return False
        return self.purse.to_come_s > self.purse.turn_s

    def spend(self, turns: float) -> None:
        """Records how much longer turns were than plain ones. A negative time was won, and may be spent again."""
        self._own_turns -= turns
        if self.purse is None or self.purse.turn_s is None:
            return
        if turns > 0:
            self.purse.pay("slower ways on trial", turns * self.purse.turn_s)
        else:
            self.purse.earn(-turns * self.purse.turn_s)
