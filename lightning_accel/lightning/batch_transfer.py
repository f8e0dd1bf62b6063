"""The layers around loaders and batches: preprocessing with the transfer to the device, and what techniques do."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import override

from lightning_accel.core.patch import applied
from lightning_accel.core.torch_private.training import map_parts
from lightning_accel.data import DevicePipeline, Position, Preprocess
from lightning_accel.data.loader_proxy import stood_for
from lightning_accel.lightning.packages import (
    Strategy,
    Trainer,
    TrainerFn,
    is_overridden,
    is_param_in_hook_signature,
    own,
)
from lightning_accel.lightning.private import combined_loader, is_sequential
from lightning_accel.lightning.run_engine import RunEngine
from lightning_accel.step.layers import Call, Layer
from lightning_accel.techniques.base import LoaderTerms

_DEPTH = 2  # batches prepared ahead
# Hooks that Lightning runs between loader and device. They must see a batch before it is preprocessed.
_TRANSFER = "transfer_batch_to_device"
_HOOKS_BEFORE = ("on_before_batch_transfer", _TRANSFER)


class BatchTransfer(Layer):
    """Transfers and preprocesses the batches of a Trainer, before ``on_after_batch_transfer``.

    A :class:`DevicePipeline` around each loader prepares batches ahead. If the user has overridden the transfer, or the
    strategy makes its own loaders, each batch is preprocessed during its transfer instead.
    """

    name = "preprocess"

    def __init__(self, engine: RunEngine) -> None:
        trainer, transforms = engine.module.trainer, engine.plan.of("preprocess").transforms
        # If the training step reads the loader directly, Lightning transfers no batches.
        self._takes_loader = takes_loader(trainer)
        why_inline = "" if self._takes_loader else _why_inline(trainer)  # empty if there is a pipeline
        stages = ["process_dataloader"] if not why_inline else ["batch_to_device"] if transforms else []
        super().__init__([(trainer.strategy, stages)])
        self._trainer = trainer
        self._report = engine.report
        self._pipelines: weakref.WeakSet[DevicePipeline] = weakref.WeakSet()
        self._preprocess: Preprocess | None = None
        if transforms:
            self._preprocess = Preprocess(
                transforms,
                device=trainer.strategy.root_device,
                dtype=engine.precision.image_dtype,
                rank=trainer.global_rank,
            )
            if self._preprocess.complaint:
                engine.degrade(f"preprocess: {self._preprocess.complaint}. Until then NumPy does it on the host.")
            when = f"at the transfer of each batch: {why_inline}" if why_inline else ""
            record = engine.report.of("preprocess")
            record.is_on = True
            record.status = f"{self._preprocess.describe()}; {when or 'the next batches while one is in work'}"

    def around_batch_to_device(self, call: Call, *args: Any, **kwargs: Any) -> Any:
        owner, datamodule = self._trainer.lightning_module, self._trainer.datamodule  # type: ignore[attr-defined]
        if datamodule is not None and is_overridden(_TRANSFER, datamodule):  # as Lightning chooses
            owner = datamodule
        # Runs between the user's two other hooks. Active only here, since Lightning also moves example inputs this way.
        with applied(_Transfer(owner, self._preprocess, self._each_loaders)):
            return call(*args, **kwargs)

    def around_process_dataloader(self, call: Call, *args: Any, **kwargs: Any) -> Any:
        """Returns a pipeline around a loader, or the loader itself if its batches must pass Lightning's hooks."""
        loader = call(*args, **kwargs)
        if self._takes_loader and self._preprocess is None:
            return loader
        strategy = self._trainer.strategy
        has_work = self._preprocess is not None or strategy.root_device.type != "cpu"
        depth = _DEPTH if has_work and _can_be_ahead(loader) else 0
        if self._preprocess is not None and depth == 0:
            self._report.note(
                f"preprocess: batches of this {type(loader).__name__} are prepared when they are asked for, not"
                " ahead: it may follow the training, or use its memory again. A DataLoader over a map-style"
                " dataset, or one with workers, does not."
            )
        pipeline = DevicePipeline(
            loader, strategy.root_device, self._preprocess, depth, position=lambda: self._position(pipeline)
        )
        self._pipelines.add(pipeline)
        return pipeline

    @override
    def _undo(self) -> None:
        super()._undo()
        for pipeline in list(self._pipelines):
            pipeline.close()
        give_loaders_back(self._trainer)

    def _each_loaders(self, batch: Any) -> Any:
        """Preprocesses a batch. A batch of several loaders is preprocessed in parts, one for each loader."""
        combined = combined_loader(_loop_under_way(self._trainer))
        if combined is None or is_sequential(combined):
            return self._preprocessed(0, batch)
        return map_parts(self._preprocessed, batch, combined.iterables)

    def _preprocessed(self, loader_idx: int, batch: Any) -> Any:
        assert self._preprocess is not None
        return None if batch is None else self._preprocess(batch, self._position_of(loader_idx))

    def _position(self, pipeline: DevicePipeline) -> Position:
        """Returns the position of the first batch of an iteration of a pipeline."""
        combined = combined_loader(self._trainer.fit_loop)
        loaders = [] if combined is None else combined.flattened
        number = next((number for number, loader in enumerate(loaders) if loader is pipeline), None)
        if number is None:
            return Position(training=False)
        # A step that reads the loader directly is counted before it fetches.
        return self._position_of(number).ahead(-1 if self._takes_loader else 0)

    def _position_of(self, loader_idx: int) -> Position:
        trainer = self._trainer
        return Position(
            training=trainer.training,
            epoch=trainer.current_epoch,
            batch_idx=trainer.fit_loop.epoch_loop.batch_progress.current.ready,
            loader_idx=loader_idx,
        )


class _Transfer(Layer):
    """Preprocesses a batch between the user's hooks before and after its transfer."""

    name = "preprocess"

    def __init__(self, owner: Any, preprocess: Preprocess | None, preprocessed: Callable[[Any], Any]) -> None:
        super().__init__([(owner, (_TRANSFER,))])
        self._is_on_host, self._preprocessed = preprocess is not None and preprocess.on_host, preprocessed

    def around_transfer_batch_to_device(self, call: Call, batch: Any, *args: Any) -> Any:
        if self._is_on_host:
            return call(self._preprocessed(batch), *args)
        return self._preprocessed(call(batch, *args))


class BatchLayer(Layer):
    """Passes each batch to the techniques, and gives each checkpoint the layouts of the user's own weights."""

    name = "techniques"

    def __init__(self, engine: RunEngine) -> None:
        strategy = engine.module.trainer.strategy
        # Lightning does not call `on_save_checkpoint` for a checkpoint of weights only. So this patches the state dict.
        super().__init__([(strategy, ("batch_to_device", "lightning_module_state_dict"))])
        self._engine = engine
        self._is_xla = strategy.root_device.type == "xla"

    def around_lightning_module_state_dict(self, call: Call) -> Any:
        checkpoint = {"state_dict": call()}
        self._engine.restore_layouts(checkpoint)
        return checkpoint["state_dict"]

    def around_batch_to_device(self, call: Call, *args: Any, **kwargs: Any) -> Any:
        if self._is_xla:  # on the device, XLA would compile this with the step, for each original shape of a batch
            return call(self._engine.batch(args[0]), *args[1:], **kwargs)
        return self._engine.batch(call(*args, **kwargs))


class LoaderLayer(Layer):
    """Passes the training loader to the techniques, after the Trainer has prepared it."""

    name = "techniques"

    def __init__(self, engine: RunEngine) -> None:
        self._trainer: Any = engine.module.trainer
        super().__init__([(self._trainer.strategy, ("process_dataloader",))])
        self._engine = engine

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
            has_one_epoch=trainer.max_epochs == 1 or bool(trainer.fast_dev_run),
            objection=self._objection,
            processes=trainer.num_devices,
            pins=not getattr(trainer.strategy, "wants_pipeline", False),
        )
        return self._engine.loader(loader, terms)

    def _why_not(self) -> str:
        epochs = self._trainer.reload_dataloaders_every_n_epochs
        if epochs:
            return f"it is made anew every {epochs} epochs"
        return "the training step takes its batches from it itself" if takes_loader(self._trainer) else ""

    def _objection(self) -> str:
        combined = combined_loader(self._trainer.fit_loop)
        if combined is None or len(combined.flattened) != 1:
            return "it is one of several, which draw from one stream of random numbers in turn"
        return ""


def give_loaders_back(trainer: Trainer) -> None:
    """Restores the user's own loaders in a Trainer's loops."""
    fit, validate, test, predict = trainer.fit_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop
    for loop in (fit, fit.epoch_loop.val_loop, validate, test, predict):
        if (combined := combined_loader(loop)) is not None:
            combined.flattened = [stood_for(loader) for loader in combined.flattened]


def _can_be_ahead(loader: Any) -> bool:
    """Returns whether batches may be fetched ahead: each has its own memory and does not depend on when it is fetched.

    A generator may fill one buffer over and over, keep its position, or yield what the model has just made.
    """
    loader = stood_for(loader)
    if not isinstance(loader, DataLoader) or type(loader).__iter__ is not DataLoader.__iter__:
        return False
    return loader.num_workers > 0 or not isinstance(loader.dataset, IterableDataset)


def _loop_under_way(trainer: Trainer) -> Any:
    fit = trainer.fit_loop
    loops: dict[Any, Any] = {
        TrainerFn.FITTING: fit if trainer.training else fit.epoch_loop.val_loop,
        TrainerFn.VALIDATING: trainer.validate_loop,
        TrainerFn.TESTING: trainer.test_loop,
        TrainerFn.PREDICTING: trainer.predict_loop,
    }
    return loops.get(trainer.state.fn)


def takes_loader(trainer: Trainer) -> bool:
    """Returns whether the training step reads its batches directly from the loader."""
    return is_param_in_hook_signature(trainer.lightning_module.training_step, "dataloader_iter", explicit=True)


def _why_inline(trainer: Trainer) -> str:
    module, datamodule = trainer.lightning_module, trainer.datamodule  # type: ignore[attr-defined]
    strategy = type(trainer.strategy)
    brings_loaders = strategy.process_dataloader is not own(trainer.strategy, Strategy).process_dataloader
    if brings_loaders and not getattr(strategy, "wants_pipeline", False):
        return f"{strategy.__name__} brings loaders of its own"
    for hook in _HOOKS_BEFORE:
        for owner in (module, datamodule):
            if owner is not None and is_overridden(hook, owner):
                return f"{type(owner).__name__}.{hook} comes before"
    return ""
