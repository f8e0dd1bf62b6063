"""Whether a search of Lightning's, for a batch size or a learning rate, runs the loop within the run."""

from __future__ import annotations

from lightning_accel.lightning.packages import BatchSizeFinder, LearningRateFinder, Trainer, callbacks_of


class Searches:
    """Notices a search that runs the loop within the run. It puts all callbacks, and itself, aside meanwhile."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.found = callbacks_of(trainer, LearningRateFinder, BatchSizeFinder)

    def are_running(self) -> bool:
        """Whether a search runs now."""
        return bool(self.found) and any(search not in callbacks_of(self._trainer) for search in self.found)
