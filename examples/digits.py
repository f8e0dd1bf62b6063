"""A residual network on scikit-learn's handwritten digits, as one would write it without lightning-accel.

    python examples/digits.py            # accelerated
    python examples/digits.py --plain    # the same run without the one line

The 1,797 images come with scikit-learn, 8x8 pixels each; they are scaled up to 64x64 once, so that the network has
something to convolve. It runs unchanged on a GPU.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics.classification import MulticlassAccuracy

from lightning_accel import AccelPlugin


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a way round them."""

    def __init__(self, in_channels: int, out_channels: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.relu2 = nn.ReLU()
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, stride=stride, bias=False), nn.BatchNorm2d(out_channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu1(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return self.relu2(out + self.shortcut(x))


class DigitsNet(LightningModule):
    """A small ResNet with a classifier on top.

    Args:
        width: Channels of the first stage; each of the two stages after it has twice as many as the one before.
        blocks_per_stage: Residual blocks in each of the three stages.
        lr: Peak learning rate of the one-cycle schedule.
    """

    def __init__(self, width: int = 32, blocks_per_stage: int = 1, lr: float = 4e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.stem = nn.Sequential(nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        stages = []
        channels = width
        for stage in range(3):
            out_channels = width * 2**stage
            for block in range(blocks_per_stage):
                stages.append(BasicBlock(channels, out_channels, stride=2 if stage and not block else 1))
                channels = out_channels
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(channels, 10)
        self.accuracy = MulticlassAccuracy(num_classes=10, average="micro")

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.stages(self.stem(images)).mean(dim=(2, 3)))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        # Smoothed labels, as is usual for residual networks.
        loss = F.cross_entropy(self(images), labels, label_smoothing=0.1)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        logits = self(images)
        self.log("val/loss", F.cross_entropy(logits, labels, label_smoothing=0.1))
        self.accuracy(logits, labels)
        self.log("val/accuracy", self.accuracy, prog_bar=True)

    def configure_optimizers(self) -> dict[str, Any]:
        lr = self.hparams["lr"]
        optimizer = torch.optim.AdamW(self.parameters(), lr=lr, weight_decay=0.05)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=lr, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Digits(LightningDataModule):
    """The images as ``(N, 1, size, size)`` floats in [0, 1], four in five to train on.

    Args:
        batch_size: Images a step.
        size: Height and width the images are scaled up to.
        seed: Decides the split and the order of the batches.
    """

    def __init__(self, batch_size: int = 64, size: int = 64, seed: int = 0) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.size = size
        self.seed = seed

    def setup(self, stage: str) -> None:
        digits = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
        images = F.interpolate(images, size=(self.size, self.size), mode="bilinear")
        dataset = TensorDataset(images, torch.tensor(digits.target))
        split = torch.Generator().manual_seed(self.seed)
        self.train_set, self.val_set = random_split(dataset, [0.8, 0.2], generator=split)

    def train_dataloader(self) -> DataLoader[Any]:
        order = torch.Generator().manual_seed(self.seed)
        return DataLoader(self.train_set, batch_size=self.batch_size, shuffle=True, drop_last=True, generator=order)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.val_set, batch_size=self.batch_size)


def train(
    *, plain: bool = False, epochs: int = 5, batch_size: int = 64, size: int = 64, **trainer_options: Any
) -> Trainer:
    """Trains, and returns the Trainer; ``trainer_options`` go to it as they are."""
    seed_everything(0)
    model = DigitsNet()
    data = Digits(batch_size=batch_size, size=size)
    plugins = [] if plain else [AccelPlugin()]  # the one line
    trainer = Trainer(plugins=plugins, max_epochs=epochs, log_every_n_steps=5, **trainer_options)
    trainer.fit(model, datamodule=data)
    return trainer


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a residual network on handwritten digits.")
    parser.add_argument("--plain", action="store_true", help="train without lightning-accel")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--max-steps", type=int, default=-1, help="stop after so many steps; -1: after the epochs")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--accelerator", default="auto", help="as in Lightning's Trainer: cpu, gpu, auto, …")
    args = parser.parse_args()
    trainer = train(
        plain=args.plain,
        epochs=args.epochs,
        batch_size=args.batch_size,
        max_steps=args.max_steps,
        accelerator=args.accelerator,
        devices=1,
    )
    for name, value in trainer.callback_metrics.items():
        print(f"{name} {value:.4f}")


if __name__ == "__main__":
    main()
