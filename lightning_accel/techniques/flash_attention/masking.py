"""Calls attention under several masks and biases, with rows that hide every key as hand-written attention has them.

Kernels disagree on a query that no key is left for: zeros, NaN, wrong gradients. Written by hand it is plain: -inf
everywhere gives NaN, and a large negative number everywhere gives all keys the same weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_accel.techniques.flash_attention.call import AttentionCall
from lightning_accel.techniques.flash_attention.masks import HIDES_BELOW, can_look_into

Attend = Callable[[AttentionCall], Tensor]


@dataclass
class Masking:
    """What is done to scores before the softmax.

    Attributes:
        rows: T, the number of queries.
        columns: S, the number of keys.
        device: Where masks are made.
        scale: They are multiplied by it.
        bias: And this is added, (B, H, T, S) or broadcastable to it.
        seen: True where a key is not given -inf; None: everywhere.
        shown: True where a key is not given a large negative number.
        causal_fill: What keys after a query's own are given. Kernels need no tensor for that; it is made when
            another mask comes to it.
        may_have_empty_rows: Whether ``seen`` or ``shown`` may hide all keys from a query.
    """

    rows: int
    columns: int
    device: torch.device
    scale: float = 1.0
    bias: Tensor | None = None
    seen: Tensor | None = None
    shown: Tensor | None = None
    causal_fill: float | None = None
    may_have_empty_rows: bool = False

    def multiply(self, factor: float | Tensor) -> None:
        """What was added so far is scaled with the scores."""
        if self.bias is not None:
            self.bias = self.bias * factor

    def add(self, bias: Tensor) -> None:
        self.bias = bias if self.bias is None else self.bias + bias

    def hide(self, keep: Tensor, fill: float, *, may_have_empty_rows: bool = True) -> None:
        """Gives ``fill`` to the keys where ``keep`` is False, whatever they had before."""
        self.make_causal_mask()
        # Two masks may leave a query nothing that each alone left it something.
        is_second = self.seen is not None or self.shown is not None
        self.may_have_empty_rows |= may_have_empty_rows or is_second
        if fill == -math.inf:
            self.seen = keep if self.seen is None else self.seen & keep
        else:
            self.shown = keep if self.shown is None else self.shown & keep
            self.seen = None if self.seen is None else self.seen | ~keep

    def hide_future(self, fill: float) -> None:
        """Gives ``fill`` to the keys after a query's own."""
        is_first = self.seen is None and self.shown is None
        self.make_causal_mask()
        self.causal_fill = fill
        if not is_first:
            self.make_causal_mask()

    def make_causal_mask(self) -> None:
        """Lets ``causal_fill`` become a mask like others."""
        if self.causal_fill is not None:
            fill, self.causal_fill = self.causal_fill, None
            lower = torch.ones(1, 1, self.rows, self.columns, dtype=torch.bool, device=self.device).tril()
            self.hide(lower, fill, may_have_empty_rows=False)


def attend_masked(call: AttentionCall, masking: Masking, attend: Attend) -> Tensor:
    """The call (whose own mask is not set) under its masks.

    Returns:
        (B, H, T, Dv).
    """
    call = replace(call, scale=masking.scale)
    if masking.causal_fill is not None:
        if masking.seen is None and masking.shown is None and masking.bias is None:
            return attend(replace(call, is_causal=True))
        masking.make_causal_mask()
    rows_to_mind = _rows_to_mind(masking)
    if rows_to_mind is None:
        return attend(replace(call, mask=_merged(masking, call.query.dtype)))
    if can_look_into(rows_to_mind):
        return _with_samples_by_hand(call, masking, rows_to_mind, attend)
    return _with_rows_replaced(call, masking, rows_to_mind, attend)


def _rows_to_mind(masking: Masking) -> Tensor | None:
    """Rows (…, T, 1) all of whose keys are hidden; None if that there are none is known without waiting for a GPU."""
    rows = None
    if masking.may_have_empty_rows:
        keep = masking.seen if masking.shown is None else masking.shown
        if masking.seen is not None and masking.shown is not None:
            keep = masking.seen & masking.shown
        assert keep is not None
        rows = ~keep.any(dim=-1, keepdim=True)
    if masking.bias is not None and not masking.bias.requires_grad:  # a learned bias hides nothing
        low = masking.bias.amax(dim=-1, keepdim=True) <= HIDES_BELOW
        rows = low if rows is None else rows | low
    if rows is not None and can_look_into(rows) and not rows.any():
        return None
    return rows


def _merged(masking: Masking, dtype: torch.dtype) -> Tensor | None:
    """All masks as one, boolean if there is no bias."""
    keep = masking.seen if masking.shown is None else masking.shown
    if masking.seen is not None and masking.shown is not None:
        keep = masking.seen & masking.shown
    if masking.bias is None or keep is None:
        return keep if masking.bias is None else masking.bias.to(dtype)
    return torch.where(keep, masking.bias.to(dtype), -math.inf)


def _with_samples_by_hand(call: AttentionCall, masking: Masking, rows: Tensor, attend: Attend) -> Tensor:
    """Computes the samples that hold such rows as hand-written attention does: values, gradients, NaN and all."""
    samples = rows.flatten(1).any(dim=1).expand(call.query.shape[0])
    if bool(samples.all()):
        return _by_hand(call, masking)
    some = samples.nonzero().squeeze(1)
    others = (~samples).nonzero().squeeze(1)
    out = call.query.new_empty(*call.query.shape[:3], call.value.shape[-1])
    rest = _of_samples(call, masking, others)
    fused = attend(replace(rest[0], mask=_merged(rest[1], call.query.dtype)))
    out = out.to(fused.dtype).index_copy(0, others, fused)
    return out.index_copy(0, some, _by_hand(*_of_samples(call, masking, some)).to(fused.dtype))


def _of_samples(call: AttentionCall, masking: Masking, samples: Tensor) -> tuple[AttentionCall, Masking]:
    def take(mask: Tensor | None) -> Tensor | None:
        return mask if mask is None or mask.shape[0] == 1 else mask[samples]

    part = replace(call, query=call.query[samples], key=call.key[samples], value=call.value[samples])
    return part, replace(masking, bias=take(masking.bias), seen=take(masking.seen), shown=take(masking.shown))


def _by_hand(call: AttentionCall, masking: Masking) -> Tensor:
    scores = call.query @ call.key.transpose(-2, -1) * call.true_scale
    if masking.bias is not None:
        scores = scores + masking.bias
    if masking.shown is not None:
        scores = scores.masked_fill(~masking.shown, torch.finfo(scores.dtype).min)
    if masking.seen is not None:
        scores = scores.masked_fill(~masking.seen, -math.inf)
    weights = F.dropout(scores.softmax(dim=-1), call.dropout_p, training=call.dropout_p > 0)
    return weights.to(call.value.dtype) @ call.value


def _with_rows_replaced(call: AttentionCall, masking: Masking, rows: Tensor, attend: Attend) -> Tensor:
    """Where looking would wait for the GPU: the rows' values are put right, whether there are any or not.

    Their gradients reach the values; those that would reach queries and keys, from rows that nobody should look at,
    do not.
    """
    dtype = call.query.dtype
    mask = _merged(masking, dtype)
    assert mask is not None
    # What comes out of these rows is replaced: they must not become NaN on the way.
    mask = mask | rows if mask.dtype == torch.bool else mask.masked_fill(rows, 0)
    out = attend(replace(call, mask=mask))
    absent = torch.zeros_like(rows) if masking.seen is None else ~masking.seen.any(dim=-1, keepdim=True)
    if masking.bias is not None:
        absent = absent | (masking.bias.amax(dim=-1, keepdim=True) == -math.inf)
    if masking.seen is None:
        alike = call.value.mean(dim=-2, keepdim=True)
    else:  # attention of its own, in which every score is zero
        alike = attend(replace(call, query=torch.zeros_like(call.query), mask=masking.seen | absent))
    return torch.where(rows, alike * torch.where(absent, math.nan, 1.0).to(out.dtype), out)
