"""Layers that pass a Trainer's loaders, batches and checkpoints to the techniques."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from typing_extensions import override

from lightning_accel.engine import Engine
from lightning_accel.lightning.batch_transfer import give_loaders_back, takes_loader
from lightning_accel.lightning.packages import Trainer
from lightning_accel.lightning.private import combined_loader
from lightning_accel.step.layers import Call, Layer
from lightning_accel.techniques.base import LoaderTerms


class BatchLayer(Layer):
    """Passes each batch to the techniques, and gives each checkpoint the layouts of the user's own weights."""

    name = "techniques"

    def __init__(
        self, trainer: Trainer, engine: Engine, with_own_layouts: Callable[[dict[str, Any]], dict[str, Any]]
    ) -> None:
        # Lightning does not call `on_save_checkpoint` for a checkpoint of weights only. So this patches the state dict.
        super().__init__([(trainer.strategy, ("batch_to_device", "lightning_module_state_dict"))])
        self._engine, self._with_own_layouts = engine, with_own_layouts
        self._is_xla = trainer.strategy.root_device.type == "xla"

    def around_lightning_module_state_dict(self, call: Call) -> Any:
        return self._with_own_layouts(call())

    def around_batch_to_device(self, call: Call, *args: Any, **kwargs: Any) -> Any:
        if self._is_xla:  # on the device, XLA would compile this with the step, for each original shape of a batch
            return call(self._engine.batch(args[0]), *args[1:], **kwargs)
        return self._engine.batch(call(*args, **kwargs))


class LoaderLayer(Layer):
    """Passes the training loader to the techniques, after the Trainer has prepared it."""

    name = "techniques"

    def __init__(self, trainer: Trainer, engine: Engine, *, is_piped: bool) -> None:
        super().__init__([(trainer.strategy, ("process_dataloader",))])
        self._trainer, self._engine, self._is_piped = trainer, engine, is_piped

    @override
    def _undo(self) -> None:
        super()._undo()
        give_loaders_back(self._trainer)

    def around_process_dataloader(self, call: Call, *args: Any, **kwargs: Any) -> Any:
        loader, trainer = call(*args, **kwargs), self._trainer
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
