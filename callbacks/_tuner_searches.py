"""Whether a search of Lightning's, for a batch size or a learning rate, runs the loop within the run."""

from __future__ import annotations

from typing import Any

from lightning_accel.lightning.packages import BatchSizeFinder, LearningRateFinder, Trainer


class Searches:
    """Notices a search that runs the loop within the run. It puts all callbacks, and itself, aside meanwhile."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.found = [one for one in _callbacks(trainer) if isinstance(one, (LearningRateFinder, BatchSizeFinder))]

    def are_running(self) -> bool:
        """Whether a search runs now."""
        return bool(self.found) and any(search not in _callbacks(self._trainer) for search in self.found)


def _callbacks(trainer: Trainer) -> list[Any]:
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    return callbacks
