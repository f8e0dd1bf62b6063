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
        seed: What the coins follow from. None if they follow from the run's own seed, and differ from those of the
            comparisons before; without torch there is no run, and the system gives a seed.
    """

    def __init__(self, seed: Any = None) -> None:
        if seed is None and (torch := sys.modules.get("torch")) is not None:
            seed = f"{torch.initial_seed()}, comparison {next(_NUMBERS)}"
        self._coins = random.Random(seed)

    @classmethod
    def of_run(cls, gather: Callable[[Any], list[Any]] | None) -> Schedule:
        """The schedule of a run's own steps: by its seed alone, and by that of the first rank if there are several.

        Args:
            gather: Maps a value of this process to those of all ranks; None with one process.
        """
        import torch

        seed = torch.initial_seed()
        return cls(seed if gather is None else gather(seed)[0])

    def order(self, sides: Sequence[Side]) -> list[Side]:
        """The sides of the next pair, each once. All orders are equally probable, whatever came before."""
        return self._coins.sample(sides, len(sides))

    def pair(self, original: Callable[[], float], candidate: Callable[[], float]) -> tuple[float, float]:
        """Runs both, one right after the other. Returns what each took."""
        sides = original, candidate
        took = {side: sides[side]() for side in self.order((0, 1))}
        return took[0], took[1]
