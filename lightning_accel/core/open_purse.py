"""A purse without a limit: trials may take any time, and long ones are announced."""

from __future__ import annotations

from typing_extensions import override

from lightning_accel.core.purse import Purse
from lightning_accel.core.ranks import rank_zero_info

NOTICED_S = 1.0
"""Trials that take longer, in seconds, are announced."""


class OpenPurse(Purse):
    """Pays for everything. Logs one message if trials take long.

    Args:
        name: The technique's name.
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
