"""Which loader of a fit the techniques may have something else stand for, and on which terms."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from lightning_accel.core.patch import MethodPatch, Patch
from lightning_accel.engine import Engine
from lightning_accel.lightning.batch_transfer import followed_by, give_loaders_back, takes_loader
from lightning_accel.lightning.packages import Trainer
from lightning_accel.lightning.private import combined_loader
from lightning_accel.techniques.base import LoaderTerms


class Loaders:
    """Hands the training's loader to the techniques, when the Trainer has prepared it.

    Args:
        trainer: About to fit.
        engine: Whose techniques are asked.
        is_piped: Whether a pipeline brings the batches to the device.
    """

    def __init__(self, trainer: Trainer, engine: Engine, *, is_piped: bool) -> None:
        self._trainer, self._engine, self._is_piped = trainer, engine, is_piped

    def patches(self) -> Iterator[Patch]:
        """The edit by which it is told of loaders."""
        change = functools.partial(followed_by, self._instead)
        yield MethodPatch("loader", "may be another one", self._trainer.strategy, "process_dataloader", change)

    def close(self) -> None:
        """Gives the Trainer's loops the user's own loaders back."""
        give_loaders_back(self._trainer)

    def _instead(self, loader: Any) -> Any:
        trainer = self._trainer
        if not trainer.training:
            return loader
        terms = LoaderTerms(
            why_not=self._why_not(),
            has_one_epoch=trainer.max_epochs == 1 or bool(trainer.fast_dev_run),  # type: ignore[attr-defined]
            objection=self._objection,
            processes=trainer.num_devices,
            pins=not self._is_piped,
        )
        return self._engine.loader(loader, terms)

    def _why_not(self) -> str:
        trainer: Any = self._trainer
        if trainer.reload_dataloaders_every_n_epochs:
            return f"it is made anew every {trainer.reload_dataloaders_every_n_epochs} epochs"
        return "the training step takes its batches from it itself" if takes_loader(trainer) else ""

    def _objection(self) -> str:
        combined = combined_loader(self._trainer.fit_loop)
        if combined is None or len(combined.flattened) != 1:
            return "it is one of several, which draw from one stream of random numbers in turn"
        return ""
