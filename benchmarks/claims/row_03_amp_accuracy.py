"""AMP costs under 1% accuracy.

Claimed: < 1%
Holds: weights and their updates stay in float32; only what is computed between them is rounded
Holds when: one of the two half precisions rounds too much, or spans too little, for this network
No longer holds: neither half precision has the digits, or the range, that this network needs

Measured over seeds on real data.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_accel import AccelPlugin
from lightning_accel.claims._digits import digits
from lightning_accel.claims.claim import Figure, Target, claim_in
from lightning_accel.claims.measure import device, median_interval
from lightning_accel.core.patch import temporarily
from lightning_accel.techniques.mixed_precision import DTYPES, PrecisionSetting

CLAIM = claim_in(__doc__, row=3)

SEEDS = 6
EPOCHS = 15


def measure() -> Iterator[Figure]:
    plain = [trained_accuracy("32-true", seed) for seed in range(SEEDS)]
    half: tuple[PrecisionSetting, ...] = ("bf16-mixed", "16-mixed")
    for precision in half:
        mixed = [trained_accuracy(precision, seed) for seed in range(SEEDS)]
        yield accuracy_drop(f"precision is {precision}", plain, mixed)


def accuracy_drop(condition: str, plain: list[float], mixed: list[float]) -> Figure:
    """What accuracy is lost, in the median of the seeds; less than nothing where it is gained.

    Args:
        condition: As of a figure.
        plain: Accuracies in float32, 0 to 1, one a seed.
        mixed: Those of the same seeds with mixed precision.
    """
    drop, low, high = median_interval([a - b for a, b in zip(plain, mixed, strict=True)])
    note = f"{100 * statistics.mean(plain):.2f}% to {100 * statistics.mean(mixed):.2f}%, means of {len(plain)} seeds"
    target = Target("at most", 0.01)
    return Figure(condition=condition, value=drop, low=low, high=high, unit="%", target=target, note=note)


def trained_accuracy(precision: PrecisionSetting, seed: int, epochs: int = EPOCHS) -> float:
    """Trains from scratch; the accuracy on the digits that were kept back, 0 to 1.

    The seed decides the split, the weights to begin with and the order of the batches, all alike in any precision.
    """
    training, testing = digits(seed)
    torch.manual_seed(seed)
    order = torch.Generator().manual_seed(seed)
    model = DigitsNet()
    plugin = AccelPlugin(
        precision=precision, techniques={"memory_format": "off", "inplace_activations": False}, report=False
    )
    with quiet_lightning():
        trainer = Trainer(
            accelerator=device().type,
            devices=1,
            max_epochs=epochs,
            plugins=[plugin],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(model, DataLoader(training, batch_size=64, shuffle=True, drop_last=True, generator=order))
        (found,) = trainer.validate(model, DataLoader(testing, batch_size=len(testing)), verbose=False)
    assert model.computed_in == DTYPES.get(precision, torch.float32), plugin.report.to_text()
    return float(found["accuracy"])


class DigitsNet(LightningModule):
    """A small convolutional network: (B, 1, 8, 8) → (B, 10).

    Attributes:
        computed_in: The dtype of its last layer's output in training.
    """

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1, stride=2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(512, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        )
        self.computed_in: torch.dtype | None = None

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        logits = self.net(images)
        self.computed_in = logits.dtype
        return F.cross_entropy(logits, labels)

    @override
    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        images, labels = batch
        self.log("accuracy", (self.net(images).argmax(1) == labels).float().mean())

    @override
    def configure_optimizers(self) -> Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def quiet_lightning() -> AbstractContextManager[None]:
    """Keeps Lightning from naming its devices at each of some twenty Trainers."""
    logger = logging.getLogger("lightning.pytorch")
    return temporarily(lambda: logger.level, logger.setLevel, logging.WARNING)
