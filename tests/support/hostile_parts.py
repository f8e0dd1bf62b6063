"""What the hostile models are made of: a small net that every technique acts on, and a module that trains it.

A row of the table is a function that makes a LightningModule, or a network for one. Whatever watches in it reports
to :func:`see`: a plain run and an accelerated one have to leave the same there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

DIM, TOKENS, CLASSES, BATCH = 8, 16, 4, 4

_seen: list[Any] = []


def see(*what: Any) -> None:
    """Notes what a watcher saw: names, numbers and shapes, never tensors."""
    _seen.append(what)


def take_seen() -> list[Any]:
    """What was seen since the last call."""
    seen = list(_seen)
    _seen.clear()
    return seen


@dataclass(frozen=True)
class Row:
    """A hostile model.

    Attributes:
        make: Makes the LightningModule.
        recomputed: Whether its blocks may be checkpointed without anybody's seeing it.
        warns: Filters for what torch says of it without the plugin, too.
    """

    make: Callable[[], LightningModule]
    recomputed: bool = False
    warns: tuple[str, ...] = ()


ROWS: dict[str, Row] = {}


def row(make: Any = None, **traits: Any) -> Any:
    """Adds what ``make`` makes to the table, under its name."""

    def add(make: Callable[[], Any]) -> Callable[[], Any]:
        def module() -> LightningModule:
            made = make()
            return made if isinstance(made, LightningModule) else Watched(made)

        assert make.__name__ not in ROWS, make.__name__
        ROWS[make.__name__] = Row(module, **traits)
        return make

    return add if make is None else add(make)


class Attention(nn.Module):
    """One head, spelled out: (B, T, D) → (B, T, D)."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return self.out((q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).softmax(dim=-1) @ v)


class Block(nn.Module):
    """Attention, and an MLP with what is done in place: (B, T, D) → (B, T, D)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(DIM), Attention()
        self.mlp = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.ReLU(), nn.Dropout(0.1), nn.Linear(2 * DIM, DIM))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)


class Feed(nn.Module):
    """A block without attention, which takes a second to capture: (B, T, D) → (B, T, D)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.ReLU(), nn.Dropout(0.1), nn.Linear(2 * DIM, DIM))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Net(nn.Module):
    """Convolutions, two blocks, the first with attention, in-place activations: (B, 3, 8, 8) → (B, CLASSES)."""

    def __init__(self, block: Callable[[], nn.Module] = Block, second: Callable[[], nn.Module] = Feed) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, DIM, 3, padding=1),
            nn.BatchNorm2d(DIM),
            nn.ReLU(),
            nn.Conv2d(DIM, DIM, 3, stride=2, padding=1),
            nn.ReLU(),
        )
        self.blocks = nn.ModuleList([block(), second()])
        self.head = nn.Linear(DIM, CLASSES)

    def tokens(self, x: Tensor) -> Tensor:
        return self.stem(x).flatten(2).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(dim=1))


def convolutional(*more: nn.Module) -> nn.Sequential:
    """Convolutions alone, where attention would only cost time: (B, 3, 8, 8) → (B, CLASSES)."""
    return nn.Sequential(
        nn.Conv2d(3, DIM, 3, padding=1),
        nn.BatchNorm2d(DIM),
        nn.ReLU(),
        *more,
        nn.Conv2d(DIM, DIM, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(DIM * TOKENS, CLASSES),
    )


class Watched(LightningModule):
    """Trains a network to classify images, and remembers the loss of every step."""

    steps = 5

    def __init__(self, net: nn.Module | None = None) -> None:
        super().__init__()
        self.net = Net() if net is None else net
        self.losses: list[float] = []

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.net(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.noted(self.loss(*batch))

    def noted(self, loss: Tensor) -> Tensor:
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05, momentum=0.9)

    def train_dataloader(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(self.steps * BATCH, 3, 8, 8, generator=generator)
        y = torch.randint(0, CLASSES, (self.steps * BATCH,), generator=generator)
        return DataLoader(TensorDataset(x, y), batch_size=BATCH)
