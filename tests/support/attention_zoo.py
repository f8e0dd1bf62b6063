"""Attention as people write it: many spellings of the same few lines."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from support.attention_module import Attention, Forward, as_module

FOUND: dict[str, type[Attention]] = {}


def found(forward: Forward) -> Forward:
    FOUND[forward.__name__] = as_module(forward)
    return forward


def naive_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """A helper outside of any class, as in the annotated transformer."""
    scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(q.size(-1))
    if mask is not None:
        scores = scores.masked_fill(mask == 0, -1e9)
    return torch.matmul(scores.softmax(dim=-1), v)


# -- products ----------------------------------------------------------------------------------------------------


@found
def at_sign(self, x):
    q, k, v = self.qkv(x)
    weights = F.softmax(q @ k.transpose(-2, -1) / math.sqrt(q.size(-1)), dim=-1)
    return self.merge(self.drop(weights) @ v)


@found
def function_outside(self, x):
    T = x.shape[1]
    return self.merge(naive_attention(*self.qkv(x), mask=self.lower[:T, :T]))


@found
def folded_bmm(self, x):
    q, k, v = self.qkv_folded(x)
    return self.merge_folded(torch.bmm(torch.bmm(q, k.transpose(1, 2)).softmax(-1), v))


@found
def baddbmm_for_its_scale(self, x):
    q, k, v = self.qkv_folded(x)
    scores = torch.baddbmm(torch.empty(1, 1, 1), q, k.transpose(1, 2), beta=0, alpha=0.25)
    return self.merge_folded(torch.bmm(scores.softmax(dim=-1), v))


@found
def baddbmm_with_bias(self, x):
    B, T, _ = x.shape
    q, k, v = self.qkv_folded(x)
    scores = self.relative[:, :T, :T].repeat(B, 1, 1).baddbmm(q, k.transpose(1, 2), beta=0.5, alpha=0.25)
    return self.merge_folded(torch.bmm(scores.softmax(dim=-1), v))


@found
def einsum_heads_first(self, x):
    q, k, v = self.qkv(x)
    scores = torch.einsum("b h i d, b h j d -> b h i j", q, k) * 0.2
    return self.merge(torch.einsum("bhij,bhjd->bhid", scores.softmax(-1), v))


@found
def einsum_positions_first(self, x):
    B, T, C = x.shape
    q, k, v = self.qkv_positions_first(x)
    weights = self.drop(torch.softmax(0.3 * torch.einsum("blhe,bshe->bhls", q, k), dim=-1))
    return self.o(torch.einsum("bhls,bshd->blhd", weights, v).contiguous().view(B, T, C))


@found
def einsum_heads_last(self, x):
    q, k, v = self.qkv_positions_first(x)
    weights = (torch.einsum("bqhd,bkhd->bqkh", q, k) / 2.0).softmax(dim=2)
    return self.o(torch.einsum("bqkh,bkhd->bqhd", weights, v).reshape(x.shape))


@found
def einsum_ellipsis(self, x):
    q, k, v = self.qkv(x)
    weights = torch.einsum("...id,...jd->...ij", q, k).softmax(-1)
    return self.merge(torch.einsum("...ij,...jd->...id", weights, v))


@found
def values_on_the_left(self, x):
    q, k, v = self.q(x), self.k(x).transpose(1, 2), self.v(x).transpose(1, 2)
    weights = torch.bmm(q, k).softmax(-1)
    return self.o(torch.bmm(v, weights.permute(0, 2, 1)).transpose(1, 2))


@found
def keys_on_the_left(self, x):
    q, k, v = self.qkv(x)
    weights = (k @ q.transpose(-1, -2)).softmax(dim=-2)
    return self.merge(weights.transpose(-1, -2) @ v)


# -- layouts -----------------------------------------------------------------------------------------------------


@found
def no_heads(self, x):
    return self.o(torch.softmax(self.q(x) @ self.k(x).mT / 32**0.5, -1) @ self.v(x))


@found
def one_sequence(self, x):
    return torch.stack([self.o(F.softmax(self.q(s) @ self.k(s).t() / 5, dim=1) @ self.v(s)) for s in x[:1]])


@found
def windows_in_a_fifth_dimension(self, x):
    B, T, C = x.shape
    x = x.view(B, 4, T // 4, C)
    q, k, v = (part(x).view(B, 4, T // 4, self.heads, -1).transpose(2, 3) for part in (self.q, self.k, self.v))
    return self.o(((q @ k.transpose(-1, -2)).softmax(-1) @ v).transpose(2, 3).reshape(B, T, C))


@found
def grouped_heads_by_repeat(self, x):
    q, k, v = self.qkv(x)
    k, v = (part[:, :2].repeat_interleave(2, dim=1) for part in (k, v))
    return self.merge((q @ k.transpose(-1, -2)).softmax(-1) @ v)


@found
def one_key_head_for_all(self, x):
    q, k, v = self.qkv(x)
    return self.merge((q @ k[:, :1].transpose(-1, -2)).softmax(-1) @ v[:, :1])


@found
def output_viewed_without_contiguous(self, x):
    q, k, v = self.qkv(x)
    y = (q @ k.transpose(-1, -2)).softmax(-1) @ v
    return self.o(y.view(x.shape[0], -1, self.dim))


# -- scales ------------------------------------------------------------------------------------------------------


@found
def scale_inside_the_queries(self, x):
    q, k, v = self.qkv(x)
    q = q * q.shape[-1] ** -0.5
    return self.merge(torch.matmul(self.softmax(torch.matmul(q, k.permute(0, 1, 3, 2))), v))


@found
def scale_in_place(self, x):
    q, k, v = self.qkv(x)
    scores = q @ k.transpose(-2, -1)
    scores /= 8**0.5
    return self.merge(scores.softmax(-1) @ v)


@found
def learned_temperature(self, x):
    q, k, v = self.qkv(x)
    q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    return self.merge((q @ k.transpose(-1, -2) * self.temperature).softmax(-1) @ v)


@found
def softmax_in_float32(self, x):
    q, k, v = self.qkv(x)
    return self.merge(F.softmax(q @ k.transpose(-1, -2) * 0.3, dim=-1, dtype=torch.float32).to(q.dtype) @ v)


@found
def scores_in_float32(self, x):
    q, k, v = self.qkv(x)
    return self.merge(F.softmax((q @ k.transpose(-1, -2)).float() * 0.3, dim=-1).type_as(v) @ v)


# -- masks -------------------------------------------------------------------------------------------------------


@found
def causal_buffer(self, x):
    B, T, C = x.shape
    q, k, v = self.qkv(x)
    scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
    scores = scores.masked_fill(self.lower[:T, :T] == 0, float("-inf"))
    y = self.drop(F.softmax(scores, dim=-1)) @ v
    return self.o(y.transpose(1, 2).contiguous().view(B, T, C))


@found
def causal_filled_in_place(self, x):
    T = x.shape[1]
    q, k, v = self.qkv(x)
    scores = q @ k.transpose(-2, -1)
    scores.masked_fill_(self.lower[:T, :T] == 0, -1e9)
    return self.merge(scores.softmax(-1) @ v)


@found
def causal_by_assignment(self, x):
    position = torch.arange(x.shape[1])
    q, k, v = self.qkv(x)
    scores = q @ k.transpose(-2, -1) * 0.3
    scores[(position[None] > position[:, None]).expand(scores.shape)] = -float("inf")
    return self.merge(scores.softmax(-1) @ v)


@found
def causal_by_where(self, x):
    T = x.shape[1]
    q, k, v = self.qkv(x)
    scores = q @ k.transpose(-1, -2)
    lowest = torch.full([], torch.finfo(scores.dtype).min, dtype=scores.dtype)
    return self.merge(torch.where(self.lower[:T, :T].bool(), scores, lowest).softmax(-1) @ v)


@found
def causal_by_full_like(self, x):
    T = x.shape[1]
    q, k, v = self.qkv(x)
    scores = q @ k.transpose(-1, -2)
    scores = torch.where(self.lower[:T, :T] == 0, torch.full_like(scores, -1e9), scores)
    return self.merge(scores.softmax(-1) @ v)


@found
def causal_added(self, x):
    T = x.shape[1]
    q, k, v = self.qkv(x)
    mask = torch.full((T, T), float("-inf")).triu(1)
    return self.merge((q @ k.transpose(-1, -2) * 0.3 + mask).softmax(-1) @ v)


@found
def padding_from_the_input(self, x):
    real = x.abs().sum(-1) > 0
    q, k, v = self.qkv(x)
    scores = (q @ k.transpose(-1, -2)).masked_fill(~real[:, None, None, :], float("-inf"))
    return self.merge(scores.softmax(-1) @ v)


@found
def padding_between_reshapes(self, x):
    B, T, _ = x.shape
    q, k, v = self.qkv_folded(x)
    padding = x.abs().sum(-1) == 0
    scores = torch.bmm(q, k.transpose(1, 2)).view(B, self.heads, T, T)
    scores = scores.masked_fill(padding[:, None, None], -1e9).view(B * self.heads, T, T)
    return self.merge_folded(torch.bmm(F.dropout(scores.softmax(-1), p=0.0, training=self.training), v))


@found
def padding_added_and_causal(self, x):
    T = x.shape[1]
    q, k, v = self.qkv(x)
    padding = (x.abs().sum(-1) == 0).float()[:, None, None] * torch.finfo(torch.float32).min
    scores = (q @ k.transpose(-1, -2)).masked_fill(self.lower[:T, :T] == 0, float("-inf")) + padding
    return self.merge(scores.softmax(-1) @ v)


@found
def causal_with_keys_first(self, x):
    T = x.shape[1]
    q, k, v = self.qkv(x)
    scores = (k @ q.transpose(-1, -2)).masked_fill(self.lower[:T, :T].T == 0, float("-inf"))
    return self.merge(scores.softmax(-2).transpose(-1, -2) @ v)


@found
def causal_by_ones_like(self, x):
    q, k, v = self.qkv(x)
    scores = q @ k.transpose(-1, -2)
    return self.merge(scores.masked_fill(torch.ones_like(scores).tril() == 0, float("-inf")).softmax(-1) @ v)


@found
def padding_hidden_before_and_after_the_softmax(self, x):
    padding = (x.abs().sum(-1) == 0)[:, None, None, :]
    q, k, v = self.qkv(x)
    weights = (q @ k.transpose(-1, -2)).masked_fill(padding, float("-inf")).softmax(-1)
    return self.merge(weights.masked_fill(padding, 0.0) @ v)


@found
def one_mask_for_all_queries(self, x):
    q, k, v = self.qkv(x)
    hidden = torch.arange(x.shape[1]) % 3 == 2
    return self.merge((q @ k.transpose(-1, -2)).masked_fill(hidden, -1e9).softmax(-1) @ v)


@found
def local_window(self, x):
    position = torch.arange(x.shape[1])
    q, k, v = self.qkv(x)
    near = (position[:, None] - position[None, :]).abs() <= 3
    return self.merge((q @ k.transpose(-1, -2)).masked_fill(~near, float("-inf")).softmax(-1) @ v)


# -- the softmax ---------------------------------------------------------------------------------------------------


@found
def highest_score_subtracted(self, x):
    q, k, v = self.qkv(x)
    scores = q @ k.transpose(-1, -2)
    scores = scores - scores.amax(dim=-1, keepdim=True).detach()
    return self.merge(F.softmax(input=scores, dim=-1) @ v)


@found
def highest_score_subtracted_without_its_dimension(self, x):
    q, k, v = self.qkv(x)
    scores = q @ k.transpose(-1, -2)
    return self.merge((scores - scores.max(dim=-1)[0].unsqueeze(-1)).softmax(-1) @ v)


@found
def by_exp_and_sum(self, x):
    q, k, v = self.qkv(x)
    scores = q @ k.transpose(-1, -2)
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    return self.merge(weights / weights.sum(-1, keepdim=True) @ v)


@found
def by_logsumexp(self, x):
    q, k, v = self.qkv(x)
    scores = q @ k.transpose(-1, -2)
    return self.merge((scores - scores.logsumexp(dim=-1, keepdim=True)).exp() @ v)


@found
def by_log_softmax(self, x):
    q, k, v = self.qkv(x)
    return self.merge(F.log_softmax(q @ k.transpose(-1, -2), dim=-1).exp() @ v)


@found
def weights_returned_to_nobody(self, x):
    def attend(q, k, v):
        weights = (q @ k.mT).softmax(-1)
        return weights @ v, weights.mean(1)

    y, _ = attend(*self.qkv(x))
    return self.merge(y)


@found
def negated_distances(self, x):
    q, k, v = self.qkv(x)
    return self.merge((-(q @ k.mT)).mT.mT.softmax(-1) @ v)


# -- biases ------------------------------------------------------------------------------------------------------


@found
def relative_positions(self, x):
    T = x.shape[1]
    q, k, v = self.qkv(x)
    scores = q @ k.transpose(-2, -1)
    scores += self.relative[:, :T, :T]
    return self.merge(scores.softmax(-1) @ v)


@found
def linear_biases(self, x):
    position = torch.arange(x.shape[1])
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625]).view(1, self.heads, 1, 1)
    q, k, v = self.qkv(x)
    scores = q @ k.transpose(-1, -2) * 0.3 + slopes * (position[None, :] - position[:, None])
    return self.merge(scores.softmax(-1) @ v)


@found
def shifted_windows(self, x):
    B, T, _ = x.shape
    q, k, v = self.qkv(x)
    scores = q * 0.3 @ k.transpose(-2, -1) + self.relative[:, :T, :T].unsqueeze(0)
    mask = torch.where(self.lower[:T, :T] == 0, -100.0, 0.0).expand(1, T, T)
    scores = scores.view(B, 1, self.heads, T, T) + mask.unsqueeze(1).unsqueeze(0)
    return self.merge(scores.view(-1, self.heads, T, T).softmax(-1) @ v)


@found
def content_and_position(self, x):
    q, k, v = self.qkv(x)
    scores = (q @ k.transpose(-1, -2) + q @ self.split(self.o(x)).transpose(-1, -2)) * 0.2
    return self.merge(scores.softmax(-1) @ v)
