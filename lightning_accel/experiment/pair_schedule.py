"""The order of the sides in a comparison: a fair coin decides, pair by pair. No other code draws coins."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

Side = TypeVar("Side")

_NUMBERS = itertools.count()  # numbers the comparisons of this process


class Schedule:
    """The order of the sides in each pair, or in each round of several.

    It uses its own random stream, does not touch the user's streams, and gives the same orders for the same seed.

    Args:
        seed: The seed; the same on all ranks if their turns must be the same. If None, it is made from the run's seed
            and differs between the run's comparisons. Without torch there is no run's seed, and the order is random.
    """

    def __init__(self, seed: Any = None) -> None:
        if seed is None and (torch := sys.modules.get("torch")) is not None:
            seed = f"{torch.initial_seed()}, comparison {next(_NUMBERS)}"
        self._coins = random.Random(seed)

    def order(self, sides: Sequence[Side]) -> list[Side]:
        """Returns the sides of the next pair, each once. All orders are equally likely, whatever came before."""
        return self._coins.sample(sides, len(sides))

    def pair(self, original: Callable[[], float], candidate: Callable[[], float]) -> tuple[float, float]:
        """Runs both, one right after the other. Returns the times of both."""
        sides = original, candidate
        took = {side: sides[side]() for side in self.order((0, 1))}
        return took[0], took[1]
