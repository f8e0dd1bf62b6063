"""Lightning's own XLA strategy at work on PJRT's CPU device, and small runs on it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("PJRT_DEVICE", "CPU")  # read when torch_xla starts its runtime

import torch
import torch.nn.functional as F
import torch_xla.debug.metrics as metrics
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.accelerators import XLAAccelerator
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

FEATURES, CLASSES, BATCH = 6, 3, 4


class PjrtCpu(XLAAccelerator):
    """Lightning's accelerator for XLA, which asks for TPUs, on the CPU device that PJRT brings."""

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def auto_device_count() -> int:
        return 1

    @staticmethod
    def parse_devices(devices: Any) -> Any:
        return devices

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [torch.device("xla", 0)]


def counted(name: str) -> int:
    return int(metrics.counter_value(name) or 0)


def executed() -> int:
    """How many programs this process has had run; each is looked up before, and ``ExecuteTime`` is told later."""
    return counted("CachedCompile") + counted("UncachedCompile")


@dataclass
class Seen:
    """What a run has come to, step by step."""

    losses: list[Tensor] = field(default_factory=list)
    compiled: list[int] = field(default_factory=list)
    read: list[int] = field(default_factory=list)
    executed: list[int] = field(default_factory=list)
    dtypes: set[torch.dtype] = field(default_factory=set)

    def values(self) -> list[float]:
        return [float(loss) for loss in self.losses]


class Classifier(LightningModule):
    """Rows of features, or (with ``vocabulary``) of text, to classes."""

    def __init__(self, optimizer: Callable[[Iterable[nn.Parameter]], Optimizer], vocabulary: int = 0) -> None:
        super().__init__()
        body = nn.Embedding(vocabulary, 8) if vocabulary else nn.Linear(FEATURES, 8)
        self.net = nn.Sequential(body, nn.Tanh(), nn.Linear(8, vocabulary or CLASSES))
        self.seen = Seen()
        self._optimizer = optimizer

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._loss(batch)

    def _loss(self, batch: Any) -> Tensor:
        is_text = isinstance(batch, Mapping)
        inputs, targets = (batch["input_ids"], batch["labels"]) if is_text else batch
        outputs = self.net(inputs)
        self.seen.dtypes.add(outputs.dtype)
        return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.losses.append(outputs["loss"].detach())
        self.seen.compiled.append(counted("UncachedCompile"))
        self.seen.read.append(counted("aten::_local_scalar_dense"))
        self.seen.executed.append(executed())

    def configure_optimizers(self) -> Optimizer:
        return self._optimizer(self.parameters())


def rows(batches: int) -> DataLoader[Any]:
    draw = torch.Generator().manual_seed(0)
    inputs = torch.randn(batches * BATCH, FEATURES, generator=draw)
    targets = torch.randint(CLASSES, (batches * BATCH,), generator=draw)
    return DataLoader(list(zip(inputs, targets, strict=True)), BATCH)


def texts(lengths: list[int], vocabulary: int) -> DataLoader[Any]:
    """Batches of text, each of its own length."""

    def batch(length: int) -> dict[str, Tensor]:
        ids = torch.randint(1, vocabulary, (BATCH, length), generator=torch.Generator().manual_seed(length))
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}

    return DataLoader([batch(length) for length in lengths], batch_size=None)


def adamw(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def trainer(*plugins: Any, **options: Any) -> Trainer:
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False}
    quiet |= {"enable_progress_bar": False, "enable_model_summary": False, "max_epochs": 1}
    return Trainer(**{**quiet, "accelerator": PjrtCpu(), "devices": 1, "plugins": list(plugins), **options})


def fit(
    *plugins: Any,
    loader: DataLoader[Any],
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] = adamw,
    vocabulary: int = 0,
    validation: DataLoader[Any] | None = None,
    resume: Path | None = None,
    save: Path | None = None,
    **options: Any,
) -> Classifier:
    """One fit, from the same weights each time."""
    seed_everything(0)
    module = Classifier(optimizer, vocabulary)
    running = trainer(*plugins, **options)
    running.fit(module, loader, validation, ckpt_path=resume, weights_only=False)
    if save is not None:
        running.save_checkpoint(save)
    return module
