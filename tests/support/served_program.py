"""A user's program whose checkpoints are deployed: modules, a data module, batches, a metric."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

WIDTH, CLASSES = 6, 4
Batches = list[tuple[Tensor, Tensor]]


class Served(LightningModule):
    """Features (B, width) → (B, 4)."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer: nn.Module = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0]).sum()

    def configure_optimizers(self) -> Optimizer:
        return SGD(self.parameters(), lr=0.1)


class Large(Served):
    """Of layers that are worth INT8."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__(width)
        self.layer = nn.Sequential(nn.Linear(width, 256), nn.ReLU(), nn.Linear(256, 256))


class WithData(Large):
    """With training data of its own."""

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.randn(32, WIDTH)), batch_size=8)


class Data(LightningDataModule):
    """Training data that may be elsewhere."""

    def __init__(self, width: int, folder: str = "") -> None:
        super().__init__()
        self.save_hyperparameters()
        self.width, self.folder = width, folder

    def setup(self, stage: str) -> None:
        if self.folder:
            raise FileNotFoundError(f"no {self.folder} here")
        self.rows = torch.randn(32, self.width), torch.zeros(32)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(*self.rows), batch_size=8)


def batches() -> Batches:
    return [(torch.randn(8, WIDTH), torch.randint(CLASSES, (8,))) for _ in range(3)]


def metrics() -> MulticlassAccuracy:
    return MulticlassAccuracy(CLASSES, average="micro")


def save(trainer: Trainer, module: LightningModule, path: str = "best.ckpt") -> None:
    """A checkpoint as a Trainer writes it, untrained."""
    trainer.strategy.connect(module)
    trainer.save_checkpoint(path)
