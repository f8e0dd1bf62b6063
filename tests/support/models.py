"""Small models that look like users' models: residual CNNs, transformers, and the awkward cousins of both."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class ResidualBlock(nn.Module):
    """Two convolutions, two batch norms, a shortcut: (B, C, H, W) → (B, C, H, W)."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        out = self.act(self.bn1(self.conv1(x)))
        return self.act(x + self.bn2(self.conv2(out)))


class TinyCNN(nn.Module):
    """A residual network for (B, 3, 8, 8) images."""

    def __init__(self, channels: int = 8, blocks: int = 2, classes: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.blocks = nn.ModuleList(ResidualBlock(channels) for _ in range(blocks))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.pool(x).flatten(1))


class ViewCNN(nn.Module):
    """Flattens with ``.view()``, which a channels_last tensor does not allow."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.head = nn.Linear(8 * 8 * 8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv(x))
        return self.head(x.view(x.size(0), -1))


class TransformerBlock(nn.Module):
    """Pre-norm attention, written by hand, and a feed-forward part, with dropout: (B, T, D) → (B, T, D)."""

    def __init__(self, dim: int = 16, num_heads: int = 2, dropout: float = 0.1) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        B, T, D = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(B, T, 3, self.num_heads, D // self.num_heads).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-2, -1) / (D // self.num_heads) ** 0.5).softmax(dim=-1)
        attended = (self.dropout(weights) @ v).transpose(1, 2).reshape(B, T, D)
        x = x + self.dropout(self.proj(attended))
        return x + self.dropout(self.mlp(self.norm2(x)))


class TinyTransformer(nn.Module):
    """A byte model with tied embedding and head: (B, T) tokens → (B, T, vocabulary) logits."""

    def __init__(self, dim: int = 16, blocks: int = 3, vocabulary: int = 11, dropout: float = 0.1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dim)
        self.layers = nn.ModuleList(TransformerBlock(dim, dropout=dropout) for _ in range(blocks))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class MaskedBlock(nn.Module):
    """Pre-norm attention past a mask, and a feed-forward part, without random numbers: (B, T, D) → (B, T, D)."""

    def __init__(self, dim: int = 16, num_heads: int = 2) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        B, T, D = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(B, T, 3, self.num_heads, D // self.num_heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.proj(attended.transpose(1, 2).reshape(B, T, D))
        return x + self.mlp(self.norm2(x))


class TextModel(nn.Module):
    """Takes a batch as transformers has them, padding and all: input_ids and attention_mask (B, T) → logits (B, T, V).

    No size of its own is between a sequence and what that is padded to, or it would be taken for a table of positions.
    """

    def __init__(self, dim: int = 16, blocks: int = 2, vocabulary: int = 96) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dim)
        self.layers = nn.ModuleList(MaskedBlock(dim) for _ in range(blocks))
        self.head = nn.Linear(dim, vocabulary, bias=False)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        x, mask = self.embedding(batch["input_ids"]), batch["attention_mask"].bool()[:, None, None, :]
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(x)


@dataclass(frozen=True)
class Task:
    """A model, batches for it and a loss: all that a training loop needs.

    Attributes:
        make_model: A new model; the same weights every time for the same seed.
        make_batch: The inputs and targets of a step.
        loss: ``(outputs, targets)`` → a scalar.
    """

    make_model: Callable[[], nn.Module]
    make_batch: Callable[[int], tuple[Any, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]

    def model(self, seed: int = 0) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.make_model()

    def batch(self, step: int = 0) -> tuple[Any, Tensor]:
        return self.make_batch(step)


def images(step: int, *, batch_size: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    x = torch.randn(batch_size, 3, 8, 8, generator=generator)
    return x, torch.randint(4, (batch_size,), generator=generator)


def tokens(step: int, *, batch_size: int = 4, seq_len: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2000 + step)
    text = torch.randint(11, (batch_size, seq_len + 1), generator=generator)
    return text[:, :-1], text[:, 1:]


def sentences(step: int, *, batch_size: int = 16, seq_len: int = 17) -> tuple[dict[str, Tensor], Tensor]:
    """A mapping, some of whose sequences end early, and its labels; their rows are a multiple of 16."""
    generator = torch.Generator().manual_seed(3000 + step)
    ids = torch.randint(96, (batch_size, seq_len), generator=generator)
    mask = torch.ones_like(ids)
    mask[::2, -3:] = 0
    labels = ids.roll(-1, 1).masked_fill(mask == 0, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}, labels


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


TASKS: dict[str, Task] = {
    "cnn": Task(TinyCNN, images, F.cross_entropy),
    "transformer": Task(lambda: TinyTransformer(blocks=2), tokens, token_loss),
}
TEXT = Task(TextModel, sentences, token_loss)


def grow(model: nn.Module) -> list[nn.Parameter]:
    """Gives a model of these tasks a layer more in its first block and, where its head has none, a bias.

    Returns:
        The new parameters.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        if isinstance(model, TinyCNN):
            block = model.blocks[0]
            block.bn2 = nn.Sequential(block.bn2, nn.Conv2d(8, 8, 1))
            return list(block.bn2[1].parameters())
        model.layers[0].mlp.append(nn.Linear(16, 16))
        model.head.bias = nn.Parameter(torch.linspace(-1, 1, model.head.out_features))
        return [*model.layers[0].mlp[-1].parameters(), model.head.bias]
