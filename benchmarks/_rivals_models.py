"""The models of :mod:`rivals` and what they learn, in plain torch, so that programs without Lightning train them, too.

None has dropout: random streams differ between programs, and losses are to be compared. Images are made up, a pattern a
class under much noise, and text is that of Python's standard library.
"""

from __future__ import annotations

import math
import sysconfig
from pathlib import Path

import torch
from _networks import UNet
from torch import Tensor, nn
from torch.nn import functional as F

Batch = tuple[Tensor, Tensor]


class Attention(nn.Module):
    """Causal attention in plain matrix products: (B, T, D) → (B, T, D).

    Attributes:
        is_fused: Whether torch's own kernel takes their place, as who tunes by hand writes it.
    """

    def __init__(self, dim: int, num_heads: int, seq_len: int) -> None:
        super().__init__()
        self.num_heads, self.is_fused = num_heads, False
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.register_buffer("causal", torch.tril(torch.ones(seq_len, seq_len, dtype=torch.bool)))

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)
        if self.is_fused:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
            scores = scores.masked_fill(~self.causal[:T, :T], float("-inf"))
            mixed = F.softmax(scores, dim=-1) @ v
        return self.proj(mixed.transpose(1, 2).reshape(B, T, C))


class Block(nn.Module):
    """Attention, then a network of two layers, each added to what it read."""

    def __init__(self, dim: int, num_heads: int, seq_len: int) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = Attention(dim, num_heads, seq_len)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    """(B, T) bytes → (B, T, 256) logits of the bytes that follow."""

    def __init__(self, dim: int, depth: int, num_heads: int, seq_len: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, dim), nn.Embedding(seq_len, dim)
        self.blocks = nn.ModuleList(Block(dim, num_heads, seq_len) for _ in range(depth))
        self.ln, self.head = nn.LayerNorm(dim), nn.Linear(dim, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.size(1), device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln(x))


class Residual(nn.Module):
    """Convolution, norm and ReLU twice, added to what came in, and half the size if the channels grow."""

    def __init__(self, channels_in: int, channels: int) -> None:
        super().__init__()
        stride = 1 if channels == channels_in else 2
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride=stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1, self.bn2, self.relu = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels), nn.ReLU()
        self.shortcut = nn.Identity() if stride == 1 else nn.Conv2d(channels_in, channels, 1, stride=2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(out + self.shortcut(x))


class ResidualCNN(nn.Module):
    """(B, 1, H, W) → (B, 10)."""

    def __init__(self, width: int, stages: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        sizes = [width << stage for stage in range(stages)]
        pairs = zip([width, *sizes[:-1]], sizes, strict=True)
        self.blocks = nn.Sequential(
            *(layer for a, b in pairs for layer in (Residual(a, b), Residual(b, b))),
        )
        self.head = nn.Linear(sizes[-1], 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class Encoder(nn.Module):
    """transformers' BERT with a classifier: (B, T) bytes → (B, 2)."""

    def __init__(self, dim: int, depth: int, num_heads: int, seq_len: int) -> None:
        super().__init__()
        from transformers import BertConfig, BertForSequenceClassification

        config = BertConfig(
            vocab_size=256,
            hidden_size=dim,
            num_hidden_layers=depth,
            num_attention_heads=num_heads,
            intermediate_size=4 * dim,
            max_position_embeddings=seq_len,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        self.bert = BertForSequenceClassification(config)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.bert(input_ids=tokens).logits


class LanguageLSTM(nn.Module):
    """(B, T) bytes → (B, T, 256) logits of the bytes that follow."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(256, width), nn.Linear(width, 256)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(tokens))[0])


def mlp(width: int) -> nn.Module:
    layers = (nn.Linear(256, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
    return nn.Sequential(nn.Flatten(), *layers)


def unet(width: int, levels: int) -> nn.Module:
    return UNet(width=width, levels=levels)


# -- batches -----------------------------------------------------------------------------------------------------------


def texts(count: int, batch: int, seq_len: int) -> list[Batch]:
    """Stretches of text and the bytes that follow, both (B, T) int64."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
    starts = torch.randint(len(text) - seq_len - 1, (count, batch, 1), generator=_seeded())
    found = text[starts + torch.arange(seq_len + 1)].long()
    return [(each[:, :-1].contiguous(), each[:, 1:].contiguous()) for each in found]


def brackets(count: int, batch: int, seq_len: int) -> list[Batch]:
    """Stretches of text, and whether there is a bracket in the first quarter of each."""
    return [
        (tokens, (tokens[:, : seq_len // 4] == ord("(")).any(1).long()) for tokens, _ in texts(count, batch, seq_len)
    ]


def images(count: int, batch: int, size: int) -> list[Batch]:
    """(B, 1, size, size) and one of ten classes."""
    random = _seeded()
    patterns = torch.randn(10, 1, size, size, generator=random)
    labels = torch.randint(10, (count, batch), generator=random)
    return [(patterns[each] + 4 * torch.randn(batch, 1, size, size, generator=random), each) for each in labels]


def masks(count: int, batch: int, size: int) -> list[Batch]:
    """(B, 1, size, size) under noise, and where it was above zero before."""
    random, pairs = _seeded(), []
    for _ in range(count):
        clean = F.interpolate(torch.randn(batch, 1, 8, 8, generator=random), size=size, mode="bilinear")
        pairs.append((clean + 0.5 * torch.randn(clean.shape, generator=random), (clean[:, 0] > 0).long()))
    return pairs


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)
