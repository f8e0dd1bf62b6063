"""Attention by the formula of fused kernels, in plain operations: what that formula is off, each of them may be off.

Going backward through a softmax takes, for each query, the sum over all keys of weights times their gradients. Fused
kernels, which keep no weights, take the same sum over the features of output times gradient instead
(FlashAttention, https://arxiv.org/abs/2205.14135, algorithm 4), and the output has been rounded by then. Where weights
are nearly alike, as in a network that has hardly been trained, little is left after that sum is subtracted, and what
was rounded off is much of it: in bfloat16 4% of the gradient of queries and keys, by whichever kernel.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_accel.core.dropout import is_dropout_off
from lightning_accel.techniques.flash_attention.backends import Backend
from lightning_accel.techniques.flash_attention.call import AttentionCall


class ByRows(Backend):
    """As its module has it. Takes every call without dropout, in memory that grows with the square of the length."""

    name = "by rows"

    @override
    def __call__(self, call: AttentionCall) -> Tensor:
        if call.dropout_p and not is_dropout_off():
            raise NotImplementedError("the formula is written without dropout")
        call = call.with_dense_mask()
        mask = call.band(None, 0) if call.is_causal else call.mask
        if mask is None:
            mask = call.query.new_zeros((), dtype=torch.float32)
        elif mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=torch.float32).masked_fill(~mask, -math.inf)
        result: Tensor = _Attention.apply(call.query, call.key, call.value, mask, call.true_scale)  # type: ignore[no-untyped-call]
        return result


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
        wide = torch.promote_types(query.dtype, torch.float32)
        weights = ((query @ key.mT).to(wide) * scale + mask).softmax(-1)
        output = weights.to(query.dtype) @ value
        ctx.save_for_backward(query, key, value, mask, weights, output)
        ctx.scale = scale
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask, weights, output = ctx.saved_tensors
        of_weights = (gradient @ value.mT).to(weights.dtype)
        sums = (gradient.to(weights.dtype) * output.to(weights.dtype)).sum(-1, keepdim=True)
        of_scores = weights * (of_weights - sums)
        scaled = (of_scores * ctx.scale).to(query.dtype)
        of_mask = of_scores.sum_to_size(mask.shape).to(mask.dtype) if ctx.needs_input_grad[3] else None
        return scaled @ key, scaled.mT @ query, weights.to(query.dtype).mT @ gradient, of_mask, None
