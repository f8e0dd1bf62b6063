"""One attention computation, however it was written, in the one form that every backend takes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """The arguments of one attention, all of one dtype: softmax(scale * query @ key^T + mask) @ value."""

    query: Tensor  # (B, H, T, D)
    key: Tensor  # (B, H, S, D)
    value: Tensor  # (B, H, S, Dv)
    mask: Tensor | None = None  # broadcastable to (B, H, T, S), 4-D: bool (True takes part) or floating (added)
    is_causal: bool = False  # query i sees keys 0 … i (aligned at the top left) and of those what the mask allows
    dropout_p: float = 0.0  # probability with which a weight is dropped
    scale: float | None = None  # None: 1/sqrt(D)
    window: tuple[int, int] | None = None  # keys to the left and right of its own position that a query sees; None: all

    @property
    def true_scale(self) -> float:
        """The scale as a number."""
        return 1 / math.sqrt(self.query.shape[-1]) if self.scale is None else self.scale

    @property
    def key_padding(self) -> Tensor | None:
        """The mask as (B, S) booleans, True for real keys, if it hides keys from all queries alike; else None."""
        mask = self.mask
        if mask is None or mask.dtype != torch.bool or mask.shape[1] != 1 or mask.shape[2] != 1:
            return None
        return mask[:, 0, 0].expand(self.query.shape[0], self.key.shape[2])

    def band(self, left: int | None, right: int | None) -> Tensor:
        """(1, 1, T, S) booleans: so many keys to the left and to the right of a query's position, None for all."""
        keep = torch.ones(1, 1, self.query.shape[2], self.key.shape[2], dtype=torch.bool, device=self.query.device)
        keep = keep if right is None else keep.tril(right)
        return keep if left is None else keep.triu(-left)

    def with_dense_mask(self) -> AttentionCall:
        """The same call with causality and window folded into the mask, where there is a mask already or a window."""
        if self.window is None and (self.mask is None or not self.is_causal):
            return self
        left, right = self.window or (None, None)
        seen = self.band(left, 0 if self.is_causal else right)
        if self.mask is None:
            mask = seen
        elif self.mask.dtype == torch.bool:
            mask = self.mask & seen
        else:
            mask = self.mask.masked_fill(~seen, -math.inf)
        return replace(self, mask=mask, is_causal=False, window=None)


def sdpa(call: AttentionCall) -> Tensor:
    """The call through torch's ``scaled_dot_product_attention``, which chooses the kernel: (B, H, T, Dv)."""
    call = call.with_dense_mask()
    q, k, v, mask = call.query, call.key, call.value, call.mask
    return F.scaled_dot_product_attention(q, k, v, mask, call.dropout_p, call.is_causal, scale=call.scale)
