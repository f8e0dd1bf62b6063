"""The purse without a limit: trials may take any time, and the user is told if they take long."""

from __future__ import annotations

from typing_extensions import override

from lightning_accel.core.purse import Purse
from lightning_accel.core.ranks import rank_zero_info

NOTICED_S = 1.0
"""Seconds. Trials that take longer are announced."""


class OpenPurse(Purse):
    """Pays for everything. Says so once, if that has taken long.

    Args:
        name: The technique's.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name
        self._is_said = False

    @override
    def can_pay(self, seconds: float) -> bool:
        return True

    @override
    def pay(self, what: str, seconds: float) -> None:
        super().pay(what, seconds)
        if not self._is_said and self.spent_s[what] > NOTICED_S:
            self._is_said = True
            rank_zero_info(f"lightning-accel: still trying {self._name}, which has taken {self.spent_s[what]:.1f} s")
