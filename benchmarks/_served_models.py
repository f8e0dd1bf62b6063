"""What :mod:`deploying` serves: a transformer encoder that has learnt the digits, and the demo's two networks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics.classification import MulticlassAccuracy

from lightning_accel import Plan, accelerate

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from bytes_gpt import BytesGPT, StdlibText
from digits import Digits, DigitsNet

PATCH, SIZE, CLASSES = 4, 32, 10
SIDE = SIZE // PATCH
BATCH = 16
LR = 3e-4

Batches = list[tuple[Tensor, Tensor]]


class Encoder(nn.Module):
    """A vision transformer, (B, 1, 32, 32) → (B, 10): torch's own encoder over 64 patches.

    Of BERT-small's sizes (Turc et al., 2019, https://arxiv.org/abs/1908.08962) by default: 4 layers of 512, 8 heads.

    Attributes:
        merges: Whether each four neighbours among the patches are one token, their mean: training is a quarter then, so
            that it begins with that (as in Bolya et al., 2023, https://arxiv.org/abs/2210.09461, without the matching).
    """

    def __init__(self, width: int = 512, layers: int = 4, heads: int = 8) -> None:
        super().__init__()
        self.merges = False
        self.patch = nn.Linear(PATCH * PATCH, width)
        self.position = nn.Parameter(0.02 * torch.randn(SIDE * SIDE, width))
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        patches = F.pixel_unshuffle(images, PATCH).flatten(2).transpose(1, 2)
        tokens = self.patch(patches) + self.position
        if self.merges:
            tokens = F.avg_pool2d(tokens.transpose(1, 2).unflatten(2, (SIDE, SIDE)), 2).flatten(2).transpose(1, 2)
        return self.head(self.encoder(tokens).mean(1))


def digits() -> tuple[Batches, Batches]:
    """Batches to learn from, and others: images (B, 1, 32, 32), labels (B,)."""
    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    images = F.interpolate(images, size=(SIZE, SIZE), mode="bilinear")
    labels = torch.tensor(found.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    split = len(images) * 4 // 5
    return _batched(images, labels, order[:split]), _batched(images, labels, order[split:])


def trained_encoder(merged_epochs: int, epochs: int, **sizes: int) -> tuple[Encoder, Batches]:
    """An encoder that knows its digits, first with merged patches, then with all; and batches that it has not seen."""
    torch.manual_seed(0)
    training, testing = digits()
    model = Encoder(**sizes).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.05, fused=True)
    steps = (merged_epochs + epochs) * len(training)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=LR, total_steps=steps)
    handle = accelerate(model, Plan(techniques={"inplace_activations": False}, trust="checked"))
    for epoch in range(merged_epochs + epochs):
        model.merges = epoch < merged_epochs
        for index in torch.randperm(len(training)).tolist():
            images, labels = training[index]
            with handle.step():
                loss = F.cross_entropy(model(handle.batch(images)), labels, label_smoothing=0.1)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    handle.undo()
    return model.eval(), testing


def accuracy() -> MulticlassAccuracy:
    return MulticlassAccuracy(CLASSES, average="micro")


def demo_models(small: bool) -> dict[str, tuple[nn.Module, list[Any]]]:
    """The demo's networks at their sizes there, untrained, as their speed is what is asked; and batches for them."""
    torch.manual_seed(0)
    images, text = Digits(size=40, batch_size=32), StdlibText(seq_len=64 if small else 512, batch_size=4)
    for data in (images, text):
        data.setup("fit")
    gpt = BytesGPT(dim=32, depth=1, num_heads=2, seq_len=64) if small else BytesGPT(seq_len=512)
    cnn = DigitsNet(width=8) if small else DigitsNet()
    return {
        "the demo's residual CNN, 40x40": (cnn.eval(), [next(iter(images.val_dataloader()))]),
        "the demo's GPT, 512 bytes": (gpt.eval(), [next(iter(text.val_dataloader()))]),
    }


def _batched(images: Tensor, labels: Tensor, chosen: Tensor) -> Batches:
    return [(images[some], labels[some]) for some in chosen.split(BATCH)]
