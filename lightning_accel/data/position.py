"""Where in a run a batch stands: what its randomness is derived from."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Position:
    """A batch's place in a run.

    Random numbers are derived from it and not from a generator that is handed on: a batch gets the same ones
    whether it is prepared ahead or at once, and after a run was resumed in the middle of an epoch.

    Attributes:
        training: Whether it is trained on; elsewhere only what is deterministic is applied.
        epoch: The epoch's number, from 0.
        batch_idx: The batch's number within the epoch, from 0.
        loader_idx: Which of several loaders it comes from.
    """

    training: bool = True
    epoch: int = 0
    batch_idx: int = 0
    loader_idx: int = 0

    def ahead(self, batches: int) -> Position:
        """The place so many batches later in the same epoch."""
        return replace(self, batch_idx=self.batch_idx + batches)

    def generator(self, seed: int, rank: int = 0) -> np.random.Generator:
        """The random numbers of this batch: the same for the same place, seed and rank, unrelated for any other.

        Philox: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
        """
        words = [seed % 2**64, rank, self.epoch, self.loader_idx, self.batch_idx]
        return np.random.Generator(np.random.Philox(np.random.SeedSequence(words)))
