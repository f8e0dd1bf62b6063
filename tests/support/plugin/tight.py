"""A module with room for so many samples at once: what takes more raises torch's error, as if memory had run out."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_accel import AccelPlugin
from lightning_accel.core.report import AccelWarning
from lightning_accel.memory.oom_report import DeviceStepMemoryError
from lightning_accel.settings import Plan

MakeTrainer = Callable[..., Trainer]
FITS = 3
SIZES = [2, 5, 4, 1, 5]


def asks_for(samples: int, most: float) -> None:
    if samples > most:
        raise torch.OutOfMemoryError(f"simulated: Tried to allocate {samples}.00 GiB.")


class _AsksInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, most: float) -> Tensor:
        ctx.most = most
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        asks_for(len(gradient), ctx.most)
        return gradient, None


class Tight(LightningModule):
    """Has room for ``most`` samples at once; in float64, so that sums of parts are the whole's to twelve places."""

    def __init__(self, most: float = math.inf) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        self.most = most
        self.calls: list[tuple[int, int]] = []
        self.losses: list[float] = []

    def predictions(self, x: Tensor) -> Tensor:
        asks_for(len(x), self.most)
        return self.net(x)

    def loss(self, batch: Any) -> Tensor:
        return self.predictions(batch).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.calls.append((batch_idx, len(batch)))
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 0.05)


class InBackward(Tight):
    def predictions(self, x: Tensor) -> Tensor:
        return _AsksInBackward.apply(self.net(x), self.most)


class Batches(IterableDataset[Any]):
    def __init__(self, make: Callable[[int], Any] = lambda size: vectors(size), sizes: list[int] = SIZES) -> None:
        self.make, self.sizes = make, sizes

    def __iter__(self) -> Iterator[Any]:
        torch.manual_seed(1)
        yield from map(self.make, self.sizes)


def vectors(size: int) -> Tensor:
    return torch.randn(size, 4, dtype=torch.float64)


def fit(
    make_trainer: MakeTrainer,
    model: LightningModule,
    batches: Batches | None = None,
    ckpt_path: Any = None,
    settings: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[Any, Trainer, AccelPlugin]:
    plugin = AccelPlugin.from_plan(
        Plan().replace(
            **{"memory": {"on_oom": "split"}, "precision": "32-true", "trust": "checked", "report": False}
            | (settings or {})
        )
    )
    trainer = make_trainer(plugins=[plugin], **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AccelWarning)
        trainer.fit(model, DataLoader(batches or Batches(), batch_size=None), ckpt_path=ckpt_path)
    return model, trainer, plugin


def assert_same(model: Tight, plain: Tight) -> None:
    torch.testing.assert_close(model.losses, plain.losses, rtol=1e-12, atol=1e-12)
    # Adam divides by roots of small squares.
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-9, atol=1e-9)


def ended(make_trainer: MakeTrainer, model: LightningModule, batches: Batches | None = None, **options: Any) -> str:
    with pytest.raises(DeviceStepMemoryError) as raised:
        fit(make_trainer, model, batches, **options)
    return str(raised.value)


@dataclass
class Sample:
    x: Tensor
    weight: float
    names: list[str]


def of(batch: Any) -> Tensor:
    if isinstance(batch, Tensor):
        return batch
    return batch[0] if isinstance(batch, tuple | list) else batch["x"] if isinstance(batch, dict) else batch.x


class Reads(Tight):
    def loss(self, batch: Any) -> Tensor:
        x = of(batch)
        if isinstance(batch, Sample):
            assert len(batch.names) == len(x)
            return self.predictions(x).square().mean() * batch.weight
        return self.predictions(x).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)
