"""A small network on images, and runs of it on a host that computes in bfloat16."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_accel import AccelPlugin
from lightning_accel.core.host import Host
from support.techniques.memory_format_cases import clock

IMAGE = (3, 8, 8)


def compute_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this machine has: the precision that is chosen is bfloat16, and channels_last is the faster layout."""
    host = Host(kind="cpu", device_name="a CPU with bfloat16", native_bf16=True)
    monkeypatch.setattr(Host, "detect", lambda device=None: host)
    clock(monkeypatch, 2.0)


class Net(LightningModule):
    """A small network on images; what it hands on is for subclasses to say."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.activation = nn.ReLU()
        self.head = nn.Linear(8, 4)
        self.losses: list[float] = []

    def features(self, x: Tensor) -> Tensor:
        return self.activation(self.conv(x))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = F.cross_entropy(self.head(self.features(x).mean((2, 3))), y)
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self.head(self.features(batch[0]).mean((2, 3))), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(model: LightningModule, plugin: AccelPlugin | None, steps: int = 8, **settings: Any) -> Trainer:
    data = TensorDataset(torch.randn(steps * 4, *IMAGE), torch.randint(4, (steps * 4,)))
    trainer = Trainer(
        plugins=[plugin] if plugin else [],
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"enable_checkpointing": False, **settings},
    )
    trainer.fit(model, DataLoader(data, batch_size=4, shuffle=True), *([DataLoader(data, batch_size=8)]))
    return trainer


def run(make: Callable[[], LightningModule], plugin: AccelPlugin | None, **settings: Any) -> Any:
    seed_everything(0)
    model = make()
    fit(model, plugin, **settings)
    return model
