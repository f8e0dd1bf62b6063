"""The attention that torch's compiler recognises, as the models write it that each of its patterns was made for.

By the number of the pattern in ``torch/_inductor/fx_passes/fuse_attention.py``. The dropouts of those that have one are
on in evaluation as well, as they are there.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from support.attention_module import Attention, Forward, as_module

PATTERNS: dict[int, type[Attention]] = {}
WITH_DROPOUT = frozenset((3, 4, 6, 7, 9, 12, 13, 16, 17, 18, 19, 20, 25, 26, 27, 28))
WITH_EMPTY_ROWS_AS_ZEROS = frozenset((29, 30))


def pattern(number: int):
    def register(forward: Forward) -> Forward:
        PATTERNS[number] = as_module(forward)
        return forward

    return register


def permuted(self, x: Tensor) -> list[Tensor]:
    """(B, H, T, D) each, from (B, T, H, D)."""
    return [part.permute(0, 2, 1, 3) for part in self.qkv_positions_first(x)]


def added_padding(x: Tensor, fill: float, dtype: torch.dtype | None = None) -> Tensor:
    """(B, 1, 1, T), zero for real positions."""
    return torch.zeros(len(x), 1, 1, x.shape[1], dtype=dtype or x.dtype).masked_fill(is_padding(x)[:, None, None], fill)


def is_padding(x: Tensor) -> Tensor:
    return x.abs().sum(-1) == 0


@pattern(1)
def divided_by_a_tensor(self, x):
    q, k, v = self.qkv(x)
    return self.merge(torch.matmul(q, k.transpose(-2, -1)).div(self.root).softmax(dim=-1).matmul(v))


@pattern(2)
def times_a_tensor(self, x):
    q, k, v = self.qkv(x)
    return self.merge(torch.matmul(q, k.transpose(-2, -1)).mul(1 / self.root).softmax(dim=-1).matmul(v))


@pattern(3)
def divided_and_dropped(self, x):
    q, k, v = self.qkv(x)
    weights = torch.matmul(q, k.transpose(-2, -1)).div(self.root).softmax(dim=-1)
    return self.merge(F.dropout(weights, p=self.drop.p).matmul(v))


@pattern(4)
def multiplied_and_dropped(self, x):
    q, k, v = self.qkv(x)
    weights = torch.matmul(q, k.transpose(-2, -1)).mul(1 / self.root).softmax(dim=-1)
    return self.merge(F.dropout(weights, p=self.drop.p).matmul(v))


@pattern(5)
def mask_added(self, x):
    q, k, v = self.qkv(x)
    weights = torch.softmax((q @ k.transpose(-2, -1) / 2.5) + added_padding(x, -1e4), dim=-1)
    return self.merge(weights @ v)


@pattern(6)
def mask_added_and_dropped(self, x):
    q, k, v = self.qkv(x)
    weights = torch.softmax((q @ k.transpose(-2, -1) / 2.5) + added_padding(x, -1e4), dim=-1)
    return self.merge(torch.dropout(weights, self.drop.p, True) @ v)


def float32_softmax(scores: Tensor) -> Tensor:
    return torch.softmax(scores.to(torch.float32), dim=-1)


@pattern(7)
def softmax_in_float32_and_dropped(self, x):
    q, k, v = permuted(self, x)
    weights = torch.dropout(float32_softmax(q @ k.transpose(-2, -1) / 2.5), self.drop.p, True)
    return self.merge(weights.to(q.dtype) @ v.to(q.dtype))


@pattern(8)
def softmax_in_float32(self, x):
    q, k, v = permuted(self, x)
    weights = float32_softmax(q @ k.transpose(-2, -1) / 2.5).to(q.dtype)
    return self.merge(weights @ v.to(weights.dtype))


@pattern(9)
def queries_divided_softmax_in_float32_and_dropped(self, x):
    q, k, v = permuted(self, x)
    q = q / 2.5
    weights = torch.dropout(float32_softmax(q @ k.transpose(-2, -1)), self.drop.p, True)
    return self.merge(weights.to(q.dtype) @ v.to(q.dtype))


@pattern(10)
def queries_divided_softmax_in_float32(self, x):
    q, k, v = permuted(self, x)
    q = q / 2.5
    return self.merge(float32_softmax(q @ k.transpose(-2, -1)).to(q.dtype) @ v)


@pattern(11)
def positions_first(self, x):
    q, k, v = permuted(self, x)
    return self.merge(torch.matmul(q, k.transpose(-2, -1)).div(self.root).softmax(dim=-1).matmul(v))


@pattern(12)
def positions_first_and_dropped(self, x):
    q, k, v = permuted(self, x)
    weights = torch.matmul(q, k.transpose(-2, -1)).div(self.root).softmax(dim=-1)
    return self.merge(F.dropout(weights, p=self.drop.p).matmul(v))


@pattern(13)
def three_dimensions(self, x):
    q, k, v = self.qkv_folded(x)
    weights = F.dropout(torch.bmm(q, k.transpose(1, 2)).softmax(dim=-1), p=self.drop.p)
    return self.merge_folded(torch.bmm(weights, v))


@pattern(14)
def bert(self, x):
    q, k, v = permuted(self, x)
    scores = torch.matmul(q, k.transpose(-2, -1)).div(self.root) + added_padding(x, -1e4)
    return self.merge(scores.softmax(dim=-1).matmul(v))


def distilbert_weights(scores: Tensor, real: Tensor) -> Tensor:
    fill = torch.full((), -float("inf"), dtype=scores.dtype, device=scores.device)
    mask = (real == 0).view((scores.shape[0], 1, 1, scores.shape[-1])).expand_as(scores)
    return torch.softmax(scores.masked_fill(mask, fill), dim=-1)


@pattern(15)
def distilbert(self, x):
    q, k, v = permuted(self, x)
    return self.merge(distilbert_weights((q @ k.transpose(-2, -1)).div(self.root), ~is_padding(x)) @ v)


@pattern(16)
def bert_dropped_with_a_mask_in_float32(self, x):
    q, k, v = permuted(self, x)
    scores = torch.matmul(q, k.transpose(-2, -1)).div(self.root) + added_padding(x, -1e9, torch.float32)
    return self.merge(F.dropout(scores.softmax(dim=-1), self.drop.p).to(dtype=x.dtype).matmul(v))


@pattern(17)
def distilbert_dropped(self, x):
    q, k, v = permuted(self, x)
    weights = distilbert_weights((q @ k.transpose(-2, -1)).div(self.root), ~is_padding(x))
    return self.merge(F.dropout(weights, self.drop.p) @ v)


def gpt2_scores(self, q: Tensor, k: Tensor) -> Tensor:
    scores = torch.matmul(q, k.permute(0, 1, 3, 2))
    scores = scores.div(torch.full([], 2.5, dtype=scores.dtype, device=scores.device))
    lowest = torch.full((), torch.finfo(q.dtype).min, dtype=q.dtype, device=q.device)
    T = q.shape[2]
    return torch.where(self.lower[:T, :T].bool(), scores, lowest)


@pattern(18)
def gpt2_with_its_keys_and_values_kept(self, x):
    q, k, v = permuted(self, x)
    weights = F.dropout(gpt2_scores(self, q, k).softmax(dim=-1), self.drop.p)
    return self.merge(weights.matmul(v)), k, v


@pattern(19)
def gpt2_with_padding(self, x):
    q, k, v = self.qkv(x)
    scores = gpt2_scores(self, q, k) + added_padding(x, torch.finfo(x.dtype).min, torch.float32)
    return self.merge(F.dropout(scores.softmax(dim=-1).type(v.dtype), self.drop.p).matmul(v))


@pattern(20)
def distilbert_with_divided_queries(self, x):
    q, k, v = permuted(self, x)
    weights = distilbert_weights(q.div(self.root) @ k.transpose(-2, -1), ~is_padding(x))
    return self.merge(F.dropout(weights, self.drop.p) @ v)


def t5_bias(self, x: Tensor) -> Tensor:
    return (self.relative[None, :, : x.shape[1], : x.shape[1]] + added_padding(x, torch.finfo(x.dtype).min)).float()


@pattern(21)
def t5(self, x):
    q, k, v = permuted(self, x)
    scores = (torch.matmul(q, k.permute(0, 1, 3, 2)) + t5_bias(self, x)).type_as(q)
    return self.merge(scores.float().softmax(dim=-1).type_as(q).matmul(v))


@pattern(22)
def t5_with_its_keys_and_values_kept(self, x):
    q, k, v = permuted(self, x)
    scores = torch.matmul(q, k.permute(0, 1, 3, 2))
    scores += t5_bias(self, x).type_as(scores)
    return self.merge(scores.float().softmax(dim=-1).type_as(q).matmul(v)), k, v


@pattern(23)
def t5_without_a_bias(self, x):
    q, k, v = permuted(self, x)
    scores = torch.matmul(q, k.permute(0, 1, 3, 2)).float().type_as(q)
    return self.merge(scores.float().softmax(dim=-1).type_as(q).matmul(v)), k, v


@pattern(24)
def mbart(self, x):
    B, T, _ = x.shape
    q, k, v = (part.reshape(B * self.heads, -1, part.shape[-1]) for part in self.qkv(x))
    scores = torch.bmm(q, k.transpose(1, 2))
    scores = scores.view(B, self.heads, T, -1) + added_padding(x, torch.finfo(x.dtype).min, torch.float32)
    weights = F.softmax(scores.view(B * self.heads, T, -1), dim=-1).to(x.dtype)
    return self.merge(torch.bmm(weights, v).view(B, self.heads, T, -1))


@pattern(25)
def t5_dropped(self, x):
    q, k, v = permuted(self, x)
    scores = torch.matmul(q, k.permute(0, 1, 3, 2)) + t5_bias(self, x)
    return self.merge(F.dropout(scores.float().softmax(dim=-1).type_as(q), self.drop.p).matmul(v))


@pattern(26)
def t5_dropped_with_its_keys_and_values_kept(self, x):
    q, k, v = permuted(self, x)
    scores = torch.matmul(q, k.permute(0, 1, 3, 2)) + t5_bias(self, x)
    return self.merge(F.dropout(scores.float().softmax(dim=-1).type_as(q), self.drop.p).matmul(v)), k, v


@pattern(27)
def t5_dropped_without_a_bias(self, x):
    q, k, v = permuted(self, x)
    scores = torch.matmul(q, k.permute(0, 1, 3, 2))
    return self.merge(F.dropout(scores.float().softmax(dim=-1).type_as(q), self.drop.p).matmul(v)), k, v


@pattern(28)
def visformer(self, x):
    B, T, _ = x.shape
    # Channels first, as a convolution leaves them: no operand is contiguous.
    q, k, v = (part(x).mT.reshape(B, self.heads, -1, T).permute(0, 1, 3, 2) for part in (self.q, self.k, self.v))
    weights = torch.matmul(q, k.transpose(-2, -1)).mul(1 / self.root).softmax(dim=-1)
    return self.merge(F.dropout(weights, p=self.drop.p).matmul(v))


@pattern(29)
def taken_apart_with_a_mask(self, x):
    q, k, v = permuted(self, x)
    q, k = torch.ops.aten.mul.Scalar(q, 0.6), torch.ops.aten.mul.Scalar(k.transpose(-2, -1), 0.6)
    return self.merge(torch.ops.aten._safe_softmax((q @ k) + added_padding(x, -torch.inf), -1) @ v)


@pattern(30)
def taken_apart(self, x):
    q, k, v = permuted(self, x)
    q, k = torch.ops.aten.mul.Scalar(q, 0.6), torch.ops.aten.mul.Scalar(k.transpose(-2, -1), 0.6)
    return self.merge(torch.ops.aten._safe_softmax(q @ k, -1) @ v)
