"""Calls attention under several masks and biases, with rows that hide every key as hand-written attention has them.

Kernels disagree on a query that no key is left for: zeros, NaN, wrong gradients. Written by hand it is plain: -inf
everywhere gives NaN, and a large negative number everywhere leaves all keys the same weight, or what scores that number
still lets through.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_accel.techniques.flash_attention.call import AttentionCall
from lightning_accel.techniques.flash_attention.masks import HIDES_BELOW, can_look_into

Attend = Callable[[AttentionCall], Tensor]


@dataclass(frozen=True)
class Edit:
    """One thing done to scores: a tensor is added, keys are given a number where it is False, or all is multiplied."""

    kind: Literal["add", "hide", "multiply"]
    by: Tensor | float
    fill: float = 0.0


@dataclass
class Masking:
    """What is done to scores before the softmax, in its order.

    Attributes:
        rows: T, the number of queries.
        columns: S, the number of keys.
        device: Where masks are made.
        scale: What scores are multiplied by in all.
        edits: What is done to them; tensors are (B, H, T, S) or broadcastable to it.
        causal_fill: What keys after a query's own are given, as long as nothing else is done to scores: kernels need
            no tensor for that.
        window: How many keys to the left and to the right a query sees, if that is all the mask there is.
        may_have_empty_rows: Whether keys may be hidden from a query one and all.
    """

    rows: int
    columns: int
    device: torch.device
    scale: float = 1.0
    edits: list[Edit] = field(default_factory=list)
    causal_fill: float | None = None
    window: tuple[int, int] | None = None
    may_have_empty_rows: bool = False

    def multiply(self, factor: float) -> None:
        self.scale *= factor
        self._append(Edit("multiply", factor))

    def add(self, bias: Tensor) -> None:
        self._append(Edit("add", bias))

    def hide(self, keep: Tensor, fill: float, *, may_have_empty_rows: bool = True) -> None:
        """Gives ``fill`` to the keys where ``keep`` is False, whatever they had before."""
        # Two masks may leave a query nothing that each alone left it something.
        is_second = self.causal_fill is not None or any(edit.kind != "multiply" for edit in self.edits)
        self.may_have_empty_rows |= may_have_empty_rows or is_second
        self._append(Edit("hide", keep, fill))

    def hide_future(self, fill: float) -> None:
        """Gives ``fill`` to the keys after a query's own."""
        if self.causal_fill is None and all(edit.kind == "multiply" for edit in self.edits):
            self.causal_fill = fill
        else:
            self.hide(self._lower(), fill, may_have_empty_rows=False)

    def _append(self, edit: Edit) -> None:
        if self.causal_fill is not None:  # no longer the only one
            fill, self.causal_fill = self.causal_fill, None
            self.edits.append(Edit("hide", self._lower(), fill))
            self.may_have_empty_rows |= edit.kind == "add"
        self.edits.append(edit)

    def _lower(self) -> Tensor:
        return torch.ones(1, 1, self.rows, self.columns, dtype=torch.bool, device=self.device).tril()

    @property
    def hides(self) -> list[tuple[Tensor, float]]:
        return [(edit.by, edit.fill) for edit in self.edits if edit.kind == "hide" and isinstance(edit.by, Tensor)]

    @property
    def only_hides(self) -> bool:
        return not any(edit.kind == "add" for edit in self.edits)

    def keep(self) -> Tensor:
        """True for keys that nothing hides."""
        masks = [keep for keep, _ in self.hides]
        merged = masks[0]
        for mask in masks[1:]:
            merged = merged & mask
        return merged

    def on(self, scores: Tensor) -> Tensor:
        """All edits, done to products of queries and keys that nothing was done to."""
        for edit in self.edits:
            if edit.kind == "multiply":
                scores = scores * edit.by
            elif edit.kind == "add":
                scores = scores + edit.by
            else:
                assert isinstance(edit.by, Tensor)
                lowest = torch.finfo(scores.dtype).min
                scores = torch.where(edit.by, scores, edit.fill if edit.fill == -math.inf else max(edit.fill, lowest))
        return scores


def attend_masked(call: AttentionCall, masking: Masking, attend: Attend) -> Tensor:
    """The call under its masks.

    Args:
        call: With the scale, causal or with a window if that is all the mask there is; its own mask is not set.
        masking: The masks.
        attend: Computes a call.

    Returns:
        (B, H, T, Dv).
    """
    if call.is_causal or all(edit.kind == "multiply" for edit in masking.edits):
        return attend(call)
    if masking.only_hides:
        mask = masking.keep()
        rows = ~mask.any(dim=-1, keepdim=True) if masking.may_have_empty_rows else None
    else:
        # What becomes of scores of zero: a mask to be added, in the precision that scores have.
        nothing = torch.zeros((), dtype=_float_dtype(masking, call.query.dtype), device=call.query.device)
        mask = masking.on(nothing)
        # As far off on the other side, too, scores vanish beside it, and kernels lose their way back.
        rows = mask.detach().amax(dim=-1, keepdim=True).abs() >= -HIDES_BELOW
    if rows is not None and can_look_into(rows):
        if rows.any():
            return _with_samples_by_hand(call, mask, masking, rows, attend)
        rows = None
    if rows is None:
        return attend(replace(call, mask=_for_kernel(mask, call.query.dtype)))
    return _with_rows_replaced(call, mask, masking, rows, attend)


def _float_dtype(masking: Masking, dtype: torch.dtype) -> torch.dtype:
    for edit in masking.edits:
        if edit.kind == "add" and isinstance(edit.by, Tensor):
            dtype = torch.promote_types(dtype, edit.by.dtype)
    return dtype


def _for_kernel(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype in (torch.bool, dtype):
        return mask
    # Under autocast a mask may be float32 where the computation is bfloat16, whose lowest number is a little higher.
    lowest = torch.finfo(dtype).min
    return torch.where(mask == -math.inf, mask, mask.clamp(min=lowest)).to(dtype)


def _with_samples_by_hand(call: AttentionCall, mask: Tensor, masking: Masking, rows: Tensor, attend: Attend) -> Tensor:
    """Computes the samples that hold such rows as hand-written attention does: values, gradients, NaN and all."""
    samples = rows.flatten(1).any(dim=1).expand(call.query.shape[0])
    if bool(samples.all()):
        return _by_hand(call, masking)
    some, others = samples.nonzero().squeeze(1), (~samples).nonzero().squeeze(1)
    rest = replace(_of_samples(call, others), mask=_for_kernel(_part(mask, others), call.query.dtype))
    fused = attend(rest)
    edits = [replace(edit, by=_part(edit.by, some)) if isinstance(edit.by, Tensor) else edit for edit in masking.edits]
    by_hand = _by_hand(_of_samples(call, some), replace(masking, edits=edits))
    out = fused.new_empty(*call.query.shape[:3], call.value.shape[-1])
    return out.index_copy(0, others, fused).index_copy(0, some, by_hand.to(fused.dtype))


def _part(mask: Tensor, samples: Tensor) -> Tensor:
    return mask if mask.dim() < 4 or mask.shape[0] == 1 else mask[samples]


def _of_samples(call: AttentionCall, samples: Tensor) -> AttentionCall:
    return replace(call, query=call.query[samples], key=call.key[samples], value=call.value[samples])


def _by_hand(call: AttentionCall, masking: Masking) -> Tensor:
    scores = masking.on(call.query @ call.key.transpose(-2, -1))
    weights = F.dropout(scores.softmax(dim=-1), call.dropout_p, training=call.dropout_p > 0)
    return weights.to(call.value.dtype) @ call.value


def _with_rows_replaced(call: AttentionCall, mask: Tensor, masking: Masking, rows: Tensor, attend: Attend) -> Tensor:
    """Where looking would wait for the GPU: the rows' values are put right, whether there are any or not.

    Gradients that would reach queries and keys from such rows, which nobody should look at, may be those of the kernel.
    """
    if mask.dtype != torch.bool:
        # A number that hides all keys alike is in the mask itself.
        absent = mask.detach().amax(dim=-1, keepdim=True) == -math.inf
        out = attend(replace(call, mask=_for_kernel(mask.masked_fill(absent, 0), call.query.dtype)))
        return out * torch.where(absent, math.nan, 1.0).to(out.dtype)
    # What comes out of these rows is replaced: they must not become NaN on the way.
    out = attend(replace(call, mask=mask | rows))
    absent = torch.zeros_like(rows)
    last = torch.ones_like(rows)
    for keep, fill in reversed(masking.hides):  # the last fill of a row that hides everything is what counts
        hidden = ~keep.any(dim=-1, keepdim=True)
        absent = absent | (last & hidden & (fill == -math.inf))
        last = last & ~hidden
    alike = call.value.mean(dim=-2, keepdim=True)
    return torch.where(rows, alike * torch.where(absent, math.nan, 1.0).to(out.dtype), out)
