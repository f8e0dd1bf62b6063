"""Splits ``nn.MultiheadAttention`` into four linear layers, which can be quantised like all others."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from lightning_accel.techniques.flash_attention.masks import added


class SplitAttention(nn.Module):
    """The same attention for inference, with four ``nn.Linear``. Torch stores three of them as one parameter.

    Torch's own ``torch.ao.nn.quantizable.MultiheadAttention`` computes other numbers with ``batch_first`` (torch 2.13).
    """

    in_proj_bias = None  # makes nn.TransformerEncoderLayer skip its fused form

    def __init__(self, original: nn.MultiheadAttention) -> None:
        super().__init__()
        self.num_heads, self.head_dim = original.num_heads, original.head_dim
        self.batch_first = original.batch_first
        biases = [None] * 3 if original.in_proj_bias is None else original.in_proj_bias.detach().chunk(3)
        weights = original.in_proj_weight.detach().chunk(3)
        self.query, self.key, self.value = (_linear(*pair) for pair in zip(weights, biases, strict=True))
        self.out = _linear(original.out_proj.weight.detach(), original.out_proj.bias)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,  # a hint only; attn_mask holds the mask
    ) -> tuple[Tensor, Tensor | None]:
        """Computes what :class:`torch.nn.MultiheadAttention` does: (B, T, D) with ``batch_first``, else (T, B, D)."""
        if not self.batch_first:
            query, key, value = (one.transpose(0, 1) for one in (query, key, value))
        q, k, v = (
            project(one).unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
            for project, one in ((self.query, query), (self.key, key), (self.value, value))
        )
        mask = self._mask(key_padding_mask, attn_mask, q)
        weights = None
        if need_weights:
            scores = q @ k.transpose(-2, -1) / self.head_dim**0.5
            weights = (scores if mask is None else scores + mask).softmax(-1)
            attended = weights @ v
            weights = weights.mean(1) if average_attn_weights else weights
        else:
            attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        result = self.out(attended.transpose(1, 2).flatten(2))
        return (result if self.batch_first else result.transpose(0, 1)), weights

    def _mask(self, padding: Tensor | None, attention: Tensor | None, q: Tensor) -> Tensor | None:
        """Returns both masks as one that is added to the scores, broadcastable to (B, H, T, S)."""
        mask = None
        if attention is not None:
            mask = added(attention, q.dtype).to(q.dtype)
            if mask.dim() == 3:  # (B * H, T, S)
                mask = mask.view(q.shape[0], self.num_heads, *mask.shape[1:])
        if padding is not None:
            hidden = added(padding, q.dtype).to(q.dtype)[:, None, None, :]
            mask = hidden if mask is None else mask + hidden
        return mask


def can_split(module: nn.MultiheadAttention) -> bool:
    """Returns whether :class:`SplitAttention` can compute what this module does."""
    is_alike = module.in_proj_weight is not None and module.bias_k is None and not module.add_zero_attn
    return type(module) is nn.MultiheadAttention and is_alike


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight.clone(), requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach().clone(), requires_grad=False)
    return linear
