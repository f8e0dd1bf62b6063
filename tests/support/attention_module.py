"""The module that attention written by hand stands in: its projections, tables and heads, without a forward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

MAX_LEN = 64

Forward = Callable[[Any, Tensor], Any]


class Attention(nn.Module):
    """Projections, tables and masks for a forward pass: (B, T, 32) → (B, T, 32), four heads.

    Args:
        dropout: Of the weights.
    """

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.dim, self.heads = 32, 4
        self.q, self.k, self.v, self.o = (nn.Linear(self.dim, self.dim) for _ in range(4))
        self.drop = nn.Dropout(dropout)
        self.softmax = nn.Softmax(dim=-1)
        self.temperature = nn.Parameter(torch.full((self.heads, 1, 1), 1.3))
        self.relative = nn.Parameter(0.3 * torch.randn(self.heads, MAX_LEN, MAX_LEN))
        self.register_buffer("root", torch.tensor(2.5))
        self.register_buffer("lower", torch.tril(torch.ones(MAX_LEN, MAX_LEN)))

    def split(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], x.shape[1], self.heads, -1).transpose(1, 2)

    def qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(B, H, T, D) each."""
        return self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x))

    def qkv_positions_first(self, x: Tensor) -> tuple[Tensor, ...]:
        """(B, T, H, D) each."""
        return tuple(part(x).view(*x.shape[:2], self.heads, -1) for part in (self.q, self.k, self.v))

    def qkv_folded(self, x: Tensor) -> tuple[Tensor, ...]:
        """(B * H, T, D) each."""
        return tuple(part.reshape(-1, x.shape[1], self.dim // self.heads) for part in self.qkv(x))

    def merge(self, y: Tensor) -> Tensor:
        return self.o(y.transpose(1, 2).reshape(y.shape[0], y.shape[2], -1))

    def merge_folded(self, y: Tensor) -> Tensor:
        return self.merge(y.view(-1, self.heads, *y.shape[1:]))


def as_module(forward: Forward) -> type[Attention]:
    """The kind of module, named as it is, whose forward pass ``forward`` is."""
    return type(forward.__name__, (Attention,), {"forward": forward, "__module__": forward.__module__})
