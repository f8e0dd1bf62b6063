"""The attention function that transformers calls by one of our names: through a backend, or as the module's own."""

from __future__ import annotations

import functools
import weakref
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lightning_accel.core.module_copies import silent_copy
from lightning_accel.techniques.flash_attention.backend_trial import Rehearsal
from lightning_accel.techniques.flash_attention.backends import Backend, attend
from lightning_accel.techniques.flash_attention.call import AttentionCall
from lightning_accel.techniques.flash_attention.huggingface_interface import eager_function, is_causal_by_itself
from lightning_accel.techniques.flash_attention.masks import MaskMemory

all_without_mask: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Modules that call themselves causal and yet, eagerly, were seen to attend to all keys when given no mask."""

_HIDDEN = -1e4
"""Whatever is lower in a mask hides its key, be it -inf, the lowest number of a dtype or one that looked big enough."""

_UNSUPPORTED = ("softcap", "sinks", "s_aux", "head_mask", "cache", "indices", "block_indices")
_memory = MaskMemory()


@dataclass(eq=False)
class Request:
    """A call's backend, or rehearsal, left on the module for :func:`accel_attention`, and what became of it.

    On the module, not in a context variable, which torch.compile cannot read.
    """

    NAME: ClassVar[str] = "_accel_request"

    backend: Backend | Rehearsal
    # Why the backend did not compute the attention; None if it did.
    missed: str | None = "its forward did not call transformers' attention interface"


def accel_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    *,
    has_eager_masks: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention as transformers calls it, through the backend of the module's request.

    Query (B, H, T, D), key (B, G, S, D) and value (B, G, S, Dv), H a multiple of G. ``is_causal`` says what a missing
    mask means; None: as the module says. With ``has_eager_masks``, as under ``EAGER_MASKS``, there is no causality but
    the mask's. Of the options ``position_bias`` is added to the scores.

    Returns:
        (B, T, H, Dv) and no weights; without a request, or where the options ask for more than an
        :class:`AttentionCall` has a place for, what the module's own eager attention returns.
    """
    mask = attention_mask
    if mask is not None and mask.dim() == 4 and mask.shape[-1] > key.shape[2]:
        mask = mask[..., : key.shape[2]]  # made for all that a cache will ever hold
    # As transformers reads it for torch's attention; a single query comes after all its keys.
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    is_causal = bool(is_causal) and mask is None and query.shape[2] > 1
    eager = eager_function(type(module))
    assert eager is not None
    has_own_causality = is_causal_by_itself(eager)
    if has_eager_masks:
        if is_causal and not has_own_causality:
            all_without_mask.add(module)
        is_causal = is_causal and has_own_causality
        mask = mask.to(query.dtype) if mask is not None and mask.dtype == torch.bool else mask  # which is added up
    bias = options.pop("position_bias", None)
    tensors = (query, key, value, mask, bias)

    def eagerly(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, bias: Any) -> Any:
        given = options if bias is None else {**options, "position_bias": bias}
        mask = _as_eager_mask(mask, query, key, is_causal)
        return eager(module, query, key, value, mask, scaling=scaling, dropout=dropout, **given)

    def fused(backend: Backend, query: Tensor, key: Tensor, value: Tensor, mask: Any, bias: Any) -> Any:
        rows = None if mask is None or not _may_read(mask) else _rows_without_keys(mask)
        dropout_p = dropout if module.training else 0.0
        if rows is not None and (dropout_p or len(rows) == mask.shape[2]):  # in two parts, dropout draws otherwise
            return eagerly(module, query, key, value, mask, bias)
        call = AttentionCall(query=query, key=key, value=value, is_causal=is_causal, dropout_p=dropout_p, scale=scaling)
        out = attend(_prepared(call, mask, bias, rows), backend).transpose(1, 2)
        if rows is not None and has_own_causality:  # by the place of a query among all
            by_hand, _ = eagerly(module, query, key, value, mask, bias)
            out = out.index_copy(1, rows, by_hand[:, rows].to(out.dtype))
        elif rows is not None:
            if bias is not None and bias.shape[2] > 1:
                bias = bias[:, :, rows]
            by_hand, _ = eagerly(module, query[:, :, rows], key, value, mask[:, :, rows], bias)
            out = out.index_copy(1, rows, by_hand.to(out.dtype))
        return out.contiguous(), None

    request: Request | None = vars(module).get(Request.NAME)
    if request is not None:
        request.missed = _unsupported(query, key, mask, options)
        by = request.backend
        if request.missed is None and isinstance(by, Backend):
            return fused(by, *tensors)  # type: ignore[no-any-return]
        if request.missed is None and isinstance(by, Rehearsal):
            # The eager function may call modules of the module's, a dropout say: of a copy, which nobody watches.
            plain = functools.partial(eagerly, silent_copy(module))
            # Results of some lie transposed: transformers' code, which takes any attention's, puts heads together anew.
            rest: Any = {"judged": lambda out: out[0], "keeps_strides": False}
            by.rehearse(plain, lambda backend: functools.partial(fused, backend), tensors, **rest)
    return eagerly(module, *tensors)  # type: ignore[no-any-return]


def _unsupported(query: Tensor, key: Tensor, mask: Any, options: dict[str, Any]) -> str | None:
    given = [name for name in _UNSUPPORTED if options.get(name) is not None]
    if given:
        return f"its attention has the option {given[0]!r}, which fused attention lacks"
    if options.get("output_attentions"):
        return "its attention weights are asked for"
    if query.dim() != 4 or query.shape[1] % key.shape[1] or (mask is not None and mask.dim() != 4):
        return f"its attention is of another form: queries of {tuple(query.shape)}, keys of {tuple(key.shape)}"
    return None


def _rows_without_keys(mask: Tensor) -> Tensor | None:
    """The queries that, in some sample, see no key, as indices; None if there are none.

    Their eager weights are all the same, for a score plus the lowest number is the lowest number. Kernels that keep
    the logarithm of a row's sum cannot tell that sum from one, and return gradients many times too large; so such
    queries are computed by hand. To read the mask is to wait for the device: once for all layers that share it.
    """

    def find() -> Tensor | None:
        rows = (~_takes_part(mask.detach()).any(dim=-1)).any(dim=1).any(dim=0).nonzero()[:, 0]
        return rows if len(rows) else None

    return _memory.recall((mask,), find)  # type: ignore[no-any-return]


def _takes_part(mask: Tensor) -> Tensor:
    return mask if mask.dtype == torch.bool else mask > _HIDDEN


def _may_read(mask: Tensor) -> bool:
    return not (torch.compiler.is_compiling() or (mask.is_cuda and torch.cuda.is_current_stream_capturing()))


def _prepared(call: AttentionCall, mask: Tensor | None, bias: Tensor | None, rows: Tensor | None) -> AttentionCall:
    """The call in the form that every backend takes."""
    query, key, value, is_causal = call.query, call.key, call.value, call.is_causal
    if is_causal and key.shape[2] > query.shape[2]:
        # A cache of fixed size that is not full yet: see transformers' integrations/sdpa_attention.py.
        key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
    query, key, value = _matched(query, key, value)
    if mask is not None and rows is not None:  # the result for these is not used; it must be finite, no more
        mask = mask.index_fill(2, rows, mask.dtype == torch.bool)
    elif mask is not None and not _may_read(mask):
        # Nothing can depend on what is in the mask. Without a query all weights are the same; the gradients of their
        # scores, which eager attention has by accident, are left out.
        blind = ~_takes_part(mask).any(dim=-1, keepdim=True)
        query, mask = query.masked_fill(blind, 0.0), mask.masked_fill(blind, mask.dtype == torch.bool)
    if bias is not None:
        mask = _as_eager_mask(mask, query, key, is_causal)
        bias = bias[..., : key.shape[2]]
        mask = bias if mask is None else bias + mask
        is_causal = False
    if mask is not None and mask.dtype not in (torch.bool, query.dtype):
        # The lowest number of a wider type would become -inf.
        mask = mask.clamp(min=torch.finfo(query.dtype).min).to(query.dtype)
    return replace(call, query=query, key=key, value=value, mask=mask, is_causal=is_causal)


def _matched(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The three with as many heads and samples each, and of one dtype."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    if query.shape[0] != key.shape[0]:  # learned queries, the same for all samples
        batch = max(query.shape[0], key.shape[0])
        query, key, value = (t.expand(batch, -1, -1, -1) for t in (query, key, value))
    device = query.device.type
    if torch.is_autocast_enabled(device) and query.dtype != torch.float64:
        # Rotary embeddings leave queries and keys in float32, values not.
        query, key, value = (t.to(torch.get_autocast_dtype(device)) for t in (query, key, value))
    return query, key, value


def _as_eager_mask(mask: Tensor | None, query: Tensor, key: Tensor, is_causal: bool) -> Tensor | None:
    if mask is None and is_causal:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()[None, None]
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.where(mask, torch.zeros((), dtype=query.dtype, device=mask.device), torch.finfo(query.dtype).min)
