"""In which order the sides of a comparison run: a fair coin decides, pair by pair. Nothing else draws coins."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

Side = TypeVar("Side")

_NUMBERS = itertools.count()  # of the comparisons of this process


class Schedule:
    """The order of the sides in each pair, or in each round of several.

    The coins are our own: no random stream of the user's is touched, and one seed has them fall alike.

    Args:
        seed: What the coins follow from; the same on all ranks if their turns must be. None if they follow from the
            seed of the run, and differ between its comparisons; without torch there is no run, and chance decides.
    """

    def __init__(self, seed: Any = None) -> None:
        if seed is None and (torch := sys.modules.get("torch")) is not None:
            seed = f"{torch.initial_seed()}, comparison {next(_NUMBERS)}"
        self._coins = random.Random(seed)

    def order(self, sides: Sequence[Side]) -> list[Side]:
        """The sides of the next pair, each once. All orders are equally probable, whatever came before."""
        return self._coins.sample(sides, len(sides))

    def pair(self, original: Callable[[], float], candidate: Callable[[], float]) -> tuple[float, float]:
        """Runs both, one right after the other. Returns what each took."""
        sides = original, candidate
        took = {side: sides[side]() for side in self.order((0, 1))}
        return took[0], took[1]
