"""Does augmentation help, and does it matter where it runs? The digits network on few digits, three seeds.

    python examples/augment.py               # two to four minutes on 2 cores
    python examples/augment.py --seeds 1 --epochs 20

Of scikit-learn's 1,797 digits 200 are trained on and the rest held out; they stay uint8 until they are on the device.
Each seed trains three times from the same weights: without augmentation; with it on the device, through
`AccelPlugin(preprocess=[...])`; and with it on the host before the transfer, through a `DevicePipeline` for the CPU
around the loader. The last two draw the same random numbers, so that a CPU gives the very same accuracies, and a GPU
the same to rounding.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch
from lightning.pytorch import Trainer, seed_everything
from sklearn.datasets import load_digits
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from digits import DigitsNet
from lightning_accel import AccelPlugin
from lightning_accel.data import (
    ColorJitter,
    DevicePipeline,
    Normalize,
    Position,
    Preprocess,
    RandomResizedCrop,
    Transform,
)

SIZE, TRAINING_IMAGES = 32, 200
NORMALIZE = Normalize(0.3, 0.35)
AUGMENTATION: list[Transform] = [
    RandomResizedCrop(SIZE, scale=(0.8, 1.0), ratio=(0.9, 1.1)),
    ColorJitter(brightness=0.4, contrast=0.4),
]


class Net(DigitsNet):
    """The digits network; its labels may be probabilities."""

    def __init__(self) -> None:
        super().__init__(width=16)


def digits() -> TensorDataset:
    """Images ``(1797, 1, 32, 32)``, uint8, and their labels."""
    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 16
    images = F.interpolate(images, size=(SIZE, SIZE), mode="bilinear")
    return TensorDataset((255 * images).round().to(torch.uint8), torch.tensor(found.target))


def accuracy(how: str, seed: int, epochs: int, accelerator: str = "auto") -> float:
    """Of the held-out digits after training.

    Args:
        how: ``"plain"``, ``"on the device"`` or ``"on the host"``.
        seed: Of the split, the weights, the order of the batches and the augmentation.
        epochs: How often each digit is seen.
        accelerator: As in Lightning's Trainer.
    """
    seed_everything(seed, verbose=False)
    data = digits()
    training, held_out = torch.utils.data.random_split(data, [TRAINING_IMAGES, len(data) - TRAINING_IMAGES])
    train_loader: Any = DataLoader(training, batch_size=64, shuffle=True, drop_last=True)
    val_loader: Any = DataLoader(held_out, batch_size=256)
    chain = [NORMALIZE] if how == "plain" else [*AUGMENTATION, NORMALIZE]
    if how == "on the host":
        train_loader = DevicePipeline(train_loader, "cpu", Preprocess(chain))
        val_loader = DevicePipeline(val_loader, "cpu", Preprocess(chain), position=lambda: Position(training=False))
        chain = []
    trainer = Trainer(
        plugins=[AccelPlugin(techniques={"memory_format": "channels_last"}, preprocess=chain, report=False)],
        accelerator=accelerator,
        devices=1,
        max_epochs=epochs,
        check_val_every_n_epoch=epochs,
        log_every_n_steps=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Net(), train_loader, val_loader)
    return float(trainer.callback_metrics["val/accuracy"])


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on few digits, with and without augmentation.")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--accelerator", default="auto", help="as in Lightning's Trainer: cpu, gpu, auto, …")
    args = parser.parse_args()
    ways = ("plain", "on the device", "on the host")
    found: dict[str, list[float]] = {how: [] for how in ways}
    print("held-out accuracy   " + "".join(how.rjust(16) for how in ways))
    for seed in range(args.seeds):
        for how in ways:
            found[how].append(accuracy(how, seed, args.epochs, args.accelerator))
        print(f"  seed {seed}".ljust(20) + "".join(f"{found[how][-1]:.2%}".rjust(16) for how in ways), flush=True)
    print("  mean".ljust(20) + "".join(f"{statistics.mean(found[how]):.2%}".rjust(16) for how in ways))


if __name__ == "__main__":
    main()
