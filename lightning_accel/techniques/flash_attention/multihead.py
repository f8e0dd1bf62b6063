"""``nn.MultiheadAttention`` with its attention through a backend of choice: as a function, and as a module."""

from __future__ import annotations

import functools
import math
import warnings
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

# Where it is defined: a program may put a class of its own, or the one below, in its place in torch.nn.
from torch.nn.modules.activation import MultiheadAttention
from typing_extensions import override

from lightning_accel.core.checks import check_choice
from lightning_accel.core.host import Host
from lightning_accel.techniques.flash_attention.backends import BACKENDS, Backend, attend
from lightning_accel.techniques.flash_attention.call import AttentionCall, Edit
from lightning_accel.techniques.flash_attention.discards import caller_discards_weights
from lightning_accel.techniques.flash_attention.masks import (
    MaskMemory,
    added,
    attend_edited,
    can_look_into,
    is_causal_mask,
)

_memory = MaskMemory()

# Torch's words for masks of two kinds, which it adds as numbers.
_MISMATCHED = "Support for mismatched key_padding_mask and attn_mask is deprecated. Use same type for both instead."


def multihead_forward(
    module: MultiheadAttention,  # with batch_first=False read (T, B, E) below
    query: Tensor,  # (B, T, E), or (T, E) for one sample
    key: Tensor,  # (B, S, kdim), or (S, kdim)
    value: Tensor,  # (B, S, vdim), or (S, vdim)
    key_padding_mask: Tensor | None = None,  # (B, S), or (S,): bool (True is ignored) or floating (added to the scores)
    need_weights: bool = True,
    attn_mask: Tensor | None = None,  # (T, S) or (B * H, T, S): bool (True is not allowed) or floating, likewise
    average_attn_weights: bool = True,
    is_causal: bool = False,  # a hint that attn_mask is the causal mask
    *,
    backend: Backend,
) -> tuple[Tensor, Tensor | None]:
    """What ``nn.MultiheadAttention.forward`` computes, with its attention through ``backend``.

    That is the output, (B, T, E) or (T, E), and the weights, (B, T, S) or (B, H, T, S), or None. Where the backend
    lacks what the call needs, torch's own choice takes its place.

    Weights that the caller reads are left to torch, which has to compute them explicitly anyway and then has the output
    from the same, dropped, weights. So is what torch refuses, for it has the words for it. A caller who asks for
    weights and never reads them (:func:`~.discards.caller_discards_weights`) gets None in their place.
    """
    masks = (key_padding_mask, attn_mask)
    is_discarded = need_weights and caller_discards_weights()
    fits = (not need_weights or is_discarded) and _fits(module, query, key, value, *masks)
    if not fits or (is_causal and attn_mask is None):
        return MultiheadAttention.forward(
            module, query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
        )
    # As torch has them: (T, B, E), of which the result is a view; dropout behind it goes by how it lies in memory.
    is_turned = module.batch_first and query.dim() == 3 and not _takes_fast_path(module, query, key, value, masks)
    if is_turned:
        turned = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)
        value = turned[0] if value is query else turned[1] if value is key else turned[2]  # what was one stays one
        query, key = turned[0], turned[0] if key is query else turned[1]
    is_batch_first = module.batch_first and not is_turned
    q, k, v = (_heads_first(t, is_batch_first) for t in _project(module, query, key, value))
    dropout_p = module.dropout if module.training else 0.0
    is_square = q.shape[2] == k.shape[2] and _num_extra_keys(module) == 0
    # Asked for weights, torch goes by the mask and not by the hint; where the two are the same the hint is cheaper.
    # A GPU's kernels drop elements each in an order of its own: with dropout the mask stays, and so the kernel.
    is_causal = key_padding_mask is None and (
        (is_causal and (is_square or not is_discarded))
        or (is_square and not (dropout_p and query.is_cuda) and _is_causal_mask(attn_mask))
    )
    k, v = _with_extra_keys(k, module, module.bias_k), _with_extra_keys(v, module, module.bias_v)
    mask = None if is_causal else _mask(module, query, key_padding_mask, attn_mask)
    call = AttentionCall(query=q, key=k, value=v, is_causal=is_causal, dropout_p=dropout_p)
    del q, k, v  # as large as three batches; let go before the output is made
    if is_discarded and mask is not None:
        # Computing weights, torch gives NaN to a query without keys; asked for none, its kernels give zeros.
        edits = Edit("multiply", call.true_scale), Edit("keep" if mask.dtype == torch.bool else "add", mask)
        heads = attend_edited(call, edits, lambda call: attend(call, backend))
    else:
        heads = attend(replace(call, mask=mask), backend)
    del call
    # One sample is a batch of one, in front.
    heads = heads.transpose(1, 2) if is_batch_first or query.dim() == 2 else heads.permute(2, 0, 1, 3)
    out = F.linear(heads.reshape(query.shape), module.out_proj.weight, module.out_proj.bias)
    return out.transpose(0, 1) if is_turned else out, None


def _takes_fast_path(module: MultiheadAttention, query: Tensor, key: Tensor, value: Tensor, masks: Any) -> bool:
    """Whether torch itself would go another way, for inference, whose result lies as its shape says."""
    if module.training or not (query is key is value) or module.in_proj_weight is None or module.in_proj_bias is None:
        return False
    weights = (module.in_proj_weight, module.in_proj_bias, module.out_proj.weight, module.out_proj.bias)
    is_plain = module.num_heads % 2 == 0 and not _num_extra_keys(module) and query.dtype == module.in_proj_bias.dtype
    has_gradients = torch.is_grad_enabled() and any(t.requires_grad for t in (query, *weights))
    is_taken = torch.backends.mha.get_fastpath_enabled() and not torch.is_autocast_enabled()
    is_added = any(mask is not None and mask.is_floating_point() for mask in masks)
    return is_taken and is_plain and not has_gradients and not is_added


def _is_causal_mask(mask: Tensor | None) -> bool:
    """Whether a mask is the causal one, so that no kernel has to read it; a GPU is not waited for to find out."""
    if mask is None or mask.dim() != 2 or len(mask) == 1 or not can_look_into(mask) or mask.requires_grad:
        return False
    return bool(_memory.recall((mask,), lambda: is_causal_mask(mask)))


class FlashMultiheadAttention(MultiheadAttention):
    """``nn.MultiheadAttention`` that never computes attention weights which nobody reads.

    A drop-in: the arguments of :class:`torch.nn.MultiheadAttention` and one more, the same results, the same
    ``state_dict``.

    Args:
        backend: The kernel, as in ``flash_attention=`` of the plan; ``"sdpa"`` lets torch choose.

    Raises:
        ValueError: There is no backend of that name; or, when it is first called, the backend does not work here.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: Any = None,
        dtype: Any = None,
        *,
        backend: str = "sdpa",
    ) -> None:
        check_choice("backend", backend, list(BACKENDS))
        super().__init__(
            embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype
        )
        self.backend = backend

    @override
    def forward(self, query: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """As :meth:`nn.MultiheadAttention.forward`; shapes and masks in :func:`multihead_forward`."""
        # Not in the constructor: a module may be made where no GPU is and moved to one.
        if self.backend != "sdpa" and not torch.compiler.is_compiling():
            _check_available(self.backend, query.device)
        return multihead_forward(self, query, *args, **kwargs, backend=BACKENDS[self.backend])

    def __prepare_scriptable__(self) -> MultiheadAttention:
        """What ``torch.jit.script`` compiles in its place, with the same parameters: it reads no code of this kind."""
        plain = MultiheadAttention.__new__(MultiheadAttention)
        vars(plain).update({name: value for name, value in vars(self).items() if name != "backend"})
        return plain


@functools.cache
def _check_available(backend: str, device: torch.device) -> None:
    reason = BACKENDS[backend].unavailable(Host.detect(device))
    if reason is not None:
        raise ValueError(f"FlashMultiheadAttention(backend={backend!r}) does not work here: {reason}.")


def _num_extra_keys(module: MultiheadAttention) -> int:
    return int(module.bias_k is not None) + int(module.add_zero_attn)


def _fits(
    module: MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
) -> bool:
    """Whether these are plain tensors of the right shapes. Whatever is not, torch's own forward takes or refuses."""
    is_tracing: bool = torch.jit.is_tracing()  # type: ignore[attr-defined,no-untyped-call]
    is_plain = not (is_tracing or query.is_nested or key.is_nested or value.is_nested)
    if not is_plain or query.dim() not in (2, 3) or key.dim() != query.dim():
        return False
    at = 1 if query.dim() == 3 and module.batch_first else 0  # of the sequence
    rows, columns = query.shape[at], key.shape[at]
    batches = () if query.dim() == 2 else (query.shape[1 - at],)
    sizes = (*batches, columns) if at else (columns, *batches)
    widths = query.shape[-1:], key.shape, value.shape
    bias = module.in_proj_bias
    is_cast = bias is None or bias.dtype == query.dtype or torch.is_autocast_enabled(query.device.type)
    per_head = (math.prod(batches) * module.num_heads, rows, columns)
    return (
        widths == ((module.embed_dim,), (*sizes, module.kdim), (*sizes, module.vdim))
        and is_cast
        and (module.bias_k is None) == (module.bias_v is None)
        and _is_mask(key_padding_mask, (*batches, columns))
        and _is_mask(attn_mask, (rows, columns), per_head)
    )


def _is_mask(mask: Tensor | None, *shapes: tuple[int, ...]) -> bool:
    return mask is None or (mask.shape in shapes and (mask.dtype == torch.bool or mask.is_floating_point()))


def _project(module: MultiheadAttention, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, each (B, T or S, H, D) or as the input has batch and sequence.

    The parts of one product stay views into it: kernels read them where they lie, and the backward pass puts their
    gradients together in one copy.
    """
    weight, bias, at = module.in_proj_weight, module.in_proj_bias, module.embed_dim

    def linear(t: Tensor, weight: Tensor, first: int, parts: int = 1) -> Tensor:
        own_bias = bias if bias is None or parts == 3 else bias[first * at : (first + parts) * at]
        return F.linear(t, weight, own_bias).view(*t.shape[:-1], parts * module.num_heads, module.head_dim)

    if weight is not None and query is key and key is value:
        q, k, v = linear(query, weight, 0, 3).chunk(3, dim=-2)
    elif weight is not None and key is value:
        q, (k, v) = linear(query, weight[:at], 0), linear(key, weight[at:], 1, 2).chunk(2, dim=-2)
    else:
        own = module.q_proj_weight, module.k_proj_weight, module.v_proj_weight
        weights = zip((query, key, value), own if weight is None else weight.chunk(3), strict=True)
        q, k, v = (linear(*pair, index) for index, pair in enumerate(weights))
    return q, k, v


def _heads_first(t: Tensor, is_batch_first: bool) -> Tensor:
    """(B, T, H, D), (T, B, H, D) or (T, H, D) as (B, H, T, D)."""
    if t.dim() == 3:
        return t.transpose(0, 1).unsqueeze(0)
    return t.transpose(1, 2) if is_batch_first else t.permute(1, 2, 0, 3)


def _with_extra_keys(split: Tensor, module: MultiheadAttention, learned: Tensor | None) -> Tensor:
    """(B, H, S, D) with the learned key (1, 1, E) and the key of zeros, where the module has them, behind the last."""
    if learned is not None:
        # Under autocast the projections are of a lower precision than the parameter.
        one = learned.to(split.dtype).view(1, module.num_heads, 1, module.head_dim)
        split = torch.cat([split, one.expand(len(split), -1, -1, -1)], dim=2)
    return F.pad(split, (0, 0, 0, 1)) if module.add_zero_attn else split


def _mask(
    module: MultiheadAttention, query: Tensor, key_padding_mask: Tensor | None, attn_mask: Tensor | None
) -> Tensor | None:
    """Both of torch's masks as one of :class:`AttentionCall`'s: (B or 1, H or 1, T or 1, S), True takes part."""
    padding, mask = key_padding_mask, attn_mask
    if padding is not None and mask is not None and padding.dtype != mask.dtype:
        warnings.warn(_MISMATCHED, stacklevel=3)
        padding, mask = added(padding, query.dtype), added(mask, query.dtype)
    masks = []
    if padding is not None:
        masks.append((padding if padding.dim() == 2 else padding[None])[:, None, None])
    if mask is not None:
        heads = (mask.shape[0] // module.num_heads, module.num_heads)
        masks.append(mask[None, None] if mask.dim() == 2 else mask.view(*heads, *mask.shape[1:]))
    if not masks:
        return None
    merged: Tensor = functools.reduce(torch.logical_or if masks[0].dtype == torch.bool else torch.add, masks)
    if extra_keys := _num_extra_keys(module):
        merged = F.pad(merged, (0, extra_keys))  # seen by all: False and 0 alike
    return ~merged if merged.dtype == torch.bool else merged
