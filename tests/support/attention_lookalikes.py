"""What only looks like attention, or is more than that: code to be left alone, each with the reason to be given."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F

from support.attention_module import Attention, Forward, as_module

LEFT_ALONE: dict[str, tuple[type[Attention], str]] = {}


def left_alone(reason: str) -> Callable[[Forward], Forward]:
    def register(forward: Forward) -> Forward:
        LEFT_ALONE[forward.__name__] = as_module(forward), reason
        return forward

    return register


@left_alone("its weights are returned or stored")
def weights_returned(self, x):
    q, k, v = self.qkv(x)
    weights = (q @ k.transpose(-1, -2)).softmax(-1)
    return self.merge(weights @ v), weights


@left_alone("its weights are used elsewhere")
def weights_stored(self, x):
    q, k, v = self.qkv(x)
    weights = (q @ k.transpose(-1, -2)).softmax(-1)
    self.weights = weights.detach()
    return self.merge(weights @ v)


@left_alone("its scores are used elsewhere")
def scores_penalised(self, x):
    q, k, v = self.qkv(x)
    scores = q @ k.transpose(-1, -2)
    return self.merge(scores.softmax(-1) @ v) + scores.square().mean()


@left_alone("the second product does not sum over the keys")
def softmax_over_queries(self, x):
    q, k, v = self.qkv(x)
    return self.merge((q @ k.transpose(-1, -2)).softmax(-2) @ v)


@left_alone("`masked_fill` stands between the softmax and the product with the values")
def weights_masked(self, x):
    T = x.shape[1]
    q, k, v = self.qkv(x)
    weights = (q @ k.transpose(-1, -2)).softmax(-1).masked_fill(self.lower[:T, :T] == 0, 0.0)
    return self.merge(weights @ v)


@left_alone("`tanh` stands between its first product and the softmax")
def soft_capped(self, x):
    q, k, v = self.qkv(x)
    return self.merge((50 * torch.tanh(q @ k.transpose(-1, -2) / 50)).softmax(-1) @ v)


@left_alone("`clamp` stands between its first product and the softmax")
def clamped(self, x):
    q, k, v = self.qkv(x)
    return self.merge((q @ k.transpose(-1, -2)).clamp(-2, 2).softmax(-1) @ v)


@left_alone("`mul` stands between the softmax and the product with the values")
def dropped_by_hand(self, x):
    q, k, v = self.qkv(x)
    weights = (q @ k.transpose(-1, -2)).softmax(-1)
    return self.merge((weights * (torch.ones_like(weights) > 0.1)) @ v)


@left_alone("`masked_fill` stands between the softmax and the product with the values")
def weights_masked_by_another_mask(self, x):
    T = x.shape[1]
    q, k, v = self.qkv(x)
    future, far = self.lower[:T, :T] == 0, self.lower[:T, :T].tril(-4) == 1
    return self.merge((q @ k.transpose(-1, -2)).masked_fill(future, -1e9).softmax(-1).masked_fill(far, 0.0) @ v)


@left_alone("its scores are used elsewhere")
def highest_score_of_each_key_subtracted(self, x):
    q, k, v = self.qkv(x)
    scores = q @ k.transpose(-1, -2)
    return self.merge((scores - scores.amax(-2, keepdim=True)).softmax(-1) @ v)


@left_alone("the second product does not sum over the keys")
def normalised_over_queries(self, x):
    q, k, v = self.qkv(x)
    weights = (q @ k.transpose(-1, -2)).exp()
    return self.merge(weights / weights.sum(-2, keepdim=True) @ v)


@left_alone("no attention in what TorchDynamo could capture of its forward")
def sum_of_weights_kept_from_zero(self, x):
    q, k, v = self.qkv(x)
    weights = (q @ k.transpose(-1, -2)).exp()
    return self.merge(weights / (weights.sum(-1, keepdim=True) + 1e-6) @ v)


@left_alone("no attention in what TorchDynamo could capture of its forward")
def weights_divided_by_a_sum_without_gradients(self, x):
    q, k, v = self.qkv(x)
    weights = (q @ k.transpose(-1, -2)).exp()
    return self.merge(weights / weights.sum(-1, keepdim=True).detach() @ v)


@left_alone("masked scores are filled with -5, which leaves them a weight")
def mildly_masked(self, x):
    T = x.shape[1]
    q, k, v = self.qkv(x)
    scores = (q @ k.transpose(-1, -2)).masked_fill(self.lower[:T, :T] == 0, -5.0)
    return self.merge(scores.softmax(-1) @ v)


@left_alone("its scores are multiplied by something that differs from key to key")
def scores_gated(self, x):
    T = x.shape[1]
    q, k, v = self.qkv(x)
    return self.merge((q @ k.transpose(-1, -2) * self.lower[:T, :T]).softmax(-1) @ v)


@left_alone("gradients or autocast are switched on or off between its two products")
def scores_without_gradients(self, x):
    q, k, v = self.qkv(x)
    with torch.no_grad():
        weights = (q @ k.transpose(-1, -2)).softmax(-1)
    return self.merge(weights @ v)


@left_alone("the second product is more than one of weights and values")
def residual_in_the_second_product(self, x):
    q, k, v = self.qkv_folded(x)
    return self.merge_folded(torch.baddbmm(q, torch.bmm(q, k.mT).softmax(-1), v))


@left_alone("its scores are scaled after they were masked")
def mask_scaled_to_nothing(self, x):
    T = x.shape[1]
    q, k, v = self.qkv(x)
    scores = (q @ k.transpose(-1, -2)).masked_fill(self.lower[:T, :T] == 0, -1e4) * 1e-4
    return self.merge(scores.softmax(-1) @ v)


@left_alone("`<function relu at 0x>` writes to a tensor between its two products")
def values_overwritten_by_an_activation(self, x):
    q, k, v = self.qkv(x)
    weights = (q @ k.transpose(-1, -2)).softmax(-1)
    v = F.relu(v, inplace=True)
    return self.merge(weights @ v)


@left_alone("`mul_` writes to a tensor between its two products")
def queries_written_through_a_view(self, x):
    q, k, v = self.qkv(x)
    weights = (q @ k.transpose(-1, -2)).softmax(-1)
    part = q[:, :1]
    part.mul_(0.5)
    return self.merge(weights @ v + q)


@left_alone("`mul_` writes to a tensor between its two products")
def values_written_in_between(self, x):
    q, k, v = self.qkv(x)
    weights = (q @ k.transpose(-1, -2)).softmax(-1)
    v.mul_(2.0)
    return self.merge(weights @ v)
