"""The sides of :mod:`rivals` that are a program of Lightning's, with one line or two changed."""

from __future__ import annotations

import logging
from typing import Any

import torch
from _rivals_training import LR, Training, prepare_by_hand
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor


class Module(LightningModule):
    """What a user has: a model, a loss, and an optimizer."""

    def __init__(self, training: Training) -> None:
        super().__init__()
        self.net, self._loss = training.net, training.loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, labels = batch
        return self._loss(self.net(inputs), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=LR)


class ByHand(Module):
    """The same with what an expert changes in it."""

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self._takes_images = prepare_by_hand(self.net, training.device)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, labels = batch
        if self._takes_images:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        return super().training_step((inputs, labels), batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=LR, fused=True)


class Watch(Callback):
    """Shows every step to the clock."""

    def __init__(self, training: Training) -> None:
        self._clock = training.clock

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, outputs: Any, *_: Any) -> None:
        self._clock.step(outputs["loss"])


def fit(training: Training, *, kind: type[Module] = Module, is_compiled: bool = False, **options: Any) -> None:
    """``Trainer(**options).fit``, of the module or of ``torch.compile`` of it."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    module = kind(training)
    trainer = Trainer(
        **options,
        max_epochs=1,
        accelerator="cpu" if training.device == "cpu" else "gpu",
        devices=1,
        callbacks=[Watch(training)],
        default_root_dir=training.folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(torch.compile(module) if is_compiled else module, training.loader())


def fit_by_hand(training: Training) -> None:
    """The same with an expert's changes, and bfloat16 where the machine is faster in it."""
    fit(training, kind=ByHand, precision="bf16-mixed" if training.has_bf16 else "32-true")


def fit_accelerated(training: Training, **settings: Any) -> None:
    """The same with ``AccelPlugin(**settings)``."""
    from lightning_accel import AccelPlugin

    plugin = AccelPlugin(**settings)
    try:
        fit(training, plugins=[plugin])
    finally:
        training.notes["report"] = str(plugin.report)
