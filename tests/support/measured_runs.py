"""What the tests of SpeedMemoryLogger share: a small model, its data, and a run that is measured."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.data import DataLoader, Dataset

from lightning_accel.callbacks import SpeedMemoryLogger

BATCH_SIZE = 4
STEP_FLOPS = 2 * (2 * BATCH_SIZE * 8 * 2)  # forward, and the gradient of the weight

ALWAYS_LOGGED = {
    "accel/samples_per_sec",
    "accel/steps_per_sec",
    "accel/step_ms_p50",
    "accel/step_ms_p95",
    "accel/data_wait_frac",
    "accel/peak_memory_mib",
    "accel/host_rss_mib",
    "accel/tflops",
}


class Vectors(Dataset[Tensor]):
    """``fetch`` is called for every batch's first sample."""

    def __init__(self, batches: int, fetch: Callable[[], None] = lambda: None) -> None:
        self.samples = batches * BATCH_SIZE
        self.fetch = fetch

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Tensor:
        if index % BATCH_SIZE == 0:
            self.fetch()
        return torch.ones(8)


def no_hook(module: Model, batch_idx: int) -> None:
    """Does nothing."""


class Model(LightningModule):
    """A linear layer. ``hook`` is called with the module and the batch's number before each step."""

    def __init__(self, hook: Callable[[Model, int], Any] = no_hook) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 2)
        self.hook = hook

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        if self.hook(self, batch_idx) == "skip":
            return None
        return self.layer(batch).sum()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None: ...

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Folder(Logger):
    """Gives a run a folder, for its record, and keeps nothing there: for a CSVLogger figures are drawn, too.

    Args:
        folder: Of this run alone.
    """

    name = version = ""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = str(folder)

    @property
    def log_dir(self) -> str:
        return self._folder

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...

    def log_metrics(self, *args: Any, **kwargs: Any) -> None: ...


def loader(batches: int = 8, data: Any = None, **options: Any) -> DataLoader[Any]:
    return DataLoader(Vectors(batches) if data is None else data, batch_size=BATCH_SIZE, **options)


def fit(model: LightningModule, data: Any = None, *, fit_options: Any = None, **options: Any) -> SpeedMemoryLogger:
    """Trains on one CPU and returns the Trainer's logger, a new one unless ``callbacks`` has one."""
    callbacks = options.pop("callbacks", [])
    own = [callback for callback in callbacks if isinstance(callback, SpeedMemoryLogger)]
    measured = own[0] if own else SpeedMemoryLogger(every_s=0.0)  # of every epoch
    quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    settings = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "logger": False, **quiet, **options}
    trainer = Trainer(callbacks=callbacks if own else [measured, *callbacks], **settings)
    try:
        trainer.fit(model, loader() if data is None else data, **(fit_options or {}))
    finally:
        assert_nothing_left(trainer)
    return measured


def assert_nothing_left(trainer: Trainer) -> None:
    assert _get_current_dispatch_mode_stack() == []
    assert torch._dynamo.eval_frame._stance.stance == "default"
    assert not {"start", "stop"} & set(vars(trainer.profiler))
