"""What the tests of ``preprocess`` under a Trainer share: data, a module that keeps what it sees, a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_accel import AccelPlugin
from lightning_accel.data import (
    MixUp,
    Normalize,
    RandomCrop,
    RandomHorizontalFlip,
    Transform,
)
from lightning_accel.settings import Plan

MakeTrainer = Callable[..., Any]

NORMALIZE = Normalize([0.5, 0.4, 0.3], [0.2, 0.3, 0.4])
CHAIN: list[Transform] = [RandomCrop(8, padding=2), RandomHorizontalFlip(), NORMALIZE, MixUp(0.4, num_classes=4)]


def dataset(samples: int = 16) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(0, 256, (samples, 3, 8, 8), dtype=torch.uint8, generator=generator)
    return TensorDataset(images, torch.randint(0, 4, (samples,), generator=generator))


def loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(dataset(), **{"batch_size": 4, **options})


def plugin(chain: list[Transform] = CHAIN, **settings: Any) -> AccelPlugin:
    return AccelPlugin.from_plan(
        Plan().replace(**{"precision": "32-true", "memory_format": "off", "preprocess": chain, **settings})
    )


class Sees(LightningModule):
    """Keeps a copy of every batch, by stage."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 4))
        self.seen: dict[str, list[Any]] = {"train": [], "validate": [], "test": [], "predict": []}

    def see(self, stage: str, batch: Any) -> Tensor:
        image, label = next(iter(batch.values())) if isinstance(batch, dict) else batch
        # What the layout and dtype of a clone are is what they were.
        self.seen[stage].append((image.clone(), label.clone()))
        return F.cross_entropy(self.net(image.float()), label)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.see("train", batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.see("validate", batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.see("test", batch)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.see("predict", batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class TakesTheTransfer(Sees):
    """Has a hook between loader and device, so that nothing can be prepared ahead."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch


def fit(
    make_trainer: MakeTrainer, module: Sees, data: Any = None, given: AccelPlugin | None = None, **options: Any
) -> Any:
    trainer = make_trainer(plugins=[given or plugin()], **options)
    torch.manual_seed(3)
    trainer.fit(module, loader() if data is None else data)
    return trainer


def same(one: list[Any], other: list[Any]) -> bool:
    pairs = zip(one, other, strict=True)
    return all(torch.equal(a, b) for left, right in pairs for a, b in zip(left, right, strict=True))
