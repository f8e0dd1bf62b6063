"""What is done to scores before the softmax, and how it reaches a kernel: as a scale, a band, a mask or a bias.

Masks are looked into once, so that a causal one costs neither memory nor time. Kernels disagree on a query that no key
is left for: zeros, NaN, wrong gradients. Written by hand it is plain: -inf everywhere gives NaN, and a large negative
number everywhere leaves all keys the same weight, or what scores that number still lets through.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_accel.core.torch_private.tensors import version_of
from lightning_accel.techniques.flash_attention.call import AttentionCall
from lightning_accel.techniques.flash_attention.form import Band, Edit

Attend = Callable[[AttentionCall], Tensor]

HIDES_BELOW = -9e3  # a score that low has no weight beside scores of any model that trains
CAUSAL: Band = (None, 0)
_REMEMBERED = 64  # masks; one that is made anew for every batch must not pile up


# -- looking into masks --------------------------------------------------------------------------------------------


def is_traced(tensor: Tensor) -> bool:
    """Whether a compiler is looking on, so that a tensor has no values, or not those of a plain tensor."""
    return torch.compiler.is_compiling() or type(tensor) not in (Tensor, nn.Parameter)


def added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """One of torch's masks, in which True hides, as one that is added to the scores."""
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf) if mask.dtype == torch.bool else mask


def can_look_into(*tensors: Tensor) -> bool:
    """Whether tensors' values are there to be read, and at once: not on a GPU."""
    return all(tensor.device.type == "cpu" and not is_traced(tensor) for tensor in tensors)


def band_of(keep: Tensor) -> Band | None:
    """How many keys (…, T, S) to the left and right of its own position each query sees, None for all of them.

    None if that is not all there is to the mask, or a query sees no key.
    """
    rows, columns = keep.shape[-2:]
    if not keep.any(dim=-1).all():
        return None
    if keep.all():
        return (None, None)
    one = keep.reshape(-1, rows, columns)[0]
    right = int(one[0].nonzero().max())
    left = rows - 1 - int(one[-1].nonzero().min())
    if rows == 1 or not bool((keep == torch.ones_like(one).tril(right).triu(-left)).all()):
        return None
    return (None if left >= rows - 1 else left, None if right >= columns - 1 else right)


def causal_fill(mask: Tensor) -> float | None:
    """What an added mask gives to hidden keys, if it is zero elsewhere and hides what a causal mask hides."""
    keep = mask == 0
    if band_of(keep) != CAUSAL:
        return None
    highest = float(mask[~keep].max())
    return highest if highest <= HIDES_BELOW else None


def is_causal_mask(mask: Tensor) -> bool:
    """Whether a mask as torch takes it, True or -inf for what is hidden, is the causal one."""
    return band_of(~mask) == CAUSAL if mask.dtype == torch.bool else causal_fill(mask) == -math.inf


class MaskMemory:
    """What was seen in a mask, by what it was computed from: tensors, by identity and version, and numbers.

    As long as those are the same objects, unwritten, what was seen still holds.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], tuple[list[weakref.ref[Tensor]], Any]] = {}

    def recall(self, sources: Iterable[Any], find: Callable[[], Any]) -> Any:
        """What ``find()`` said when these sources were last seen unchanged, or says now."""
        sources = tuple(sources)
        tensors = [source for source in sources if isinstance(source, Tensor)]
        if any(tensor.is_inference() for tensor in tensors):  # which keep no count of what is written to them
            return find()
        key = tuple((id(s), version_of(s), s.data_ptr()) if isinstance(s, Tensor) else s for s in sources)
        known = self._known.get(key)
        if known is not None and all(ref() is tensor for ref, tensor in zip(known[0], tensors, strict=True)):
            return known[1]
        if len(self._known) >= _REMEMBERED:
            self._known.clear()
        seen = find()
        self._known[key] = ([weakref.ref(tensor) for tensor in tensors], seen)
        return seen


# -- attention under edits -----------------------------------------------------------------------------------------


def attend_edited(call: AttentionCall, edits: Sequence[Edit], attend: Attend, *, zero_rows: bool = False) -> Tensor:
    """softmax(edits(query @ key^T)) @ value: (B, H, T, Dv).

    The call has the scale that is in the edits, and no mask; the edits' tensors are broadcastable to (B, H, T, S). With
    ``zero_rows`` a query whose keys are all given -inf gets zeros, instead of NaN.
    """
    masks = [edit for edit in edits if edit.kind in ("add", "keep", "band")]
    if not masks:
        return attend(call)
    if len(masks) == 1 and masks[0].kind == "band":
        if masks[0].by == CAUSAL:
            return attend(replace(call, is_causal=True))
        left, right = (max(call.query.shape[2], call.key.shape[2]) if side is None else side for side in masks[0].by)
        return attend(replace(call, window=(left, right)))
    edits = [replace(edit, kind="keep", by=call.band(*edit.by)) if edit.kind == "band" else edit for edit in edits]
    if any(edit.kind == "add" for edit in edits):
        # What becomes of scores of zero: a mask to be added, in the precision that scores have.
        dtypes = [edit.by.dtype for edit in edits if edit.kind == "add"]
        dtype = functools.reduce(torch.promote_types, dtypes, call.query.dtype)
        mask = _edited(torch.zeros((), dtype=dtype, device=call.query.device), edits)
        # As far off on the other side, too, scores vanish beside it, and kernels lose their way back.
        rows = mask.detach().amax(dim=-1, keepdim=True).abs() >= -HIDES_BELOW
    else:
        mask = functools.reduce(torch.logical_and, (edit.by for edit in edits if edit.kind == "keep"))
        if len(masks) == 1 and not masks[0].has_empty_rows:
            return attend(replace(call, mask=mask))
        rows = ~mask.any(dim=-1, keepdim=True)
    if not can_look_into(rows):
        return _with_rows_replaced(call, mask, edits, rows, attend, math.nan if not zero_rows else 0.0)
    if rows.any():
        return _with_samples_by_hand(call, mask, edits, rows, attend, zero_rows)
    return attend(replace(call, mask=_for_kernel(mask, call.query.dtype)))


def scale_of(edits: Sequence[Edit]) -> float:
    """The product of the numbers that scores are multiplied by."""
    return math.prod([edit.by for edit in edits if edit.kind == "multiply"], start=1.0)


def _edited(scores: Tensor, edits: Sequence[Edit]) -> Tensor:
    for edit in edits:
        if edit.kind == "multiply":
            scores = scores * edit.by
        elif edit.kind == "add":
            scores = scores + edit.by
        elif edit.kind == "cast":
            scores = scores.to(edit.by).to(scores.dtype)
        else:
            fill = edit.fill if edit.fill == -math.inf else max(edit.fill, torch.finfo(scores.dtype).min)
            scores = torch.where(edit.by, scores, fill)
    return scores


def _for_kernel(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype in (torch.bool, dtype):
        return mask
    # Under autocast a mask may be float32 where the computation is bfloat16, whose lowest number is a little higher.
    return torch.where(mask == -math.inf, mask, mask.clamp(min=torch.finfo(dtype).min)).to(dtype)


def _with_samples_by_hand(
    call: AttentionCall, mask: Tensor, edits: Sequence[Edit], rows: Tensor, attend: Attend, zero_rows: bool
) -> Tensor:
    """Computes the samples that hold such rows as hand-written attention does: values, gradients, NaN and all."""
    samples = rows.flatten(1).any(dim=1).expand(call.query.shape[0])
    if call.dropout_p or bool(samples.all()):  # in two parts, dropout would draw otherwise
        return _by_hand(call, edits, zero_rows)
    some, others = samples.nonzero().squeeze(1), (~samples).nonzero().squeeze(1)

    def part(samples: Tensor) -> AttentionCall:
        return replace(call, query=call.query[samples], key=call.key[samples], value=call.value[samples])

    fused = attend(replace(part(others), mask=_for_kernel(_of_samples(mask, others), call.query.dtype)))
    by_hand = _by_hand(part(some), [replace(edit, by=_of_samples(edit.by, some)) for edit in edits], zero_rows)
    out = fused.new_empty(*call.query.shape[:3], call.value.shape[-1])
    return out.index_copy(0, others, fused).index_copy(0, some, by_hand.to(fused.dtype))


def _of_samples(mask: Any, samples: Tensor) -> Any:
    is_one_for_all = not isinstance(mask, Tensor) or mask.dim() < 4 or mask.shape[0] == 1
    return mask if is_one_for_all else mask[samples]


def _by_hand(call: AttentionCall, edits: Sequence[Edit], zero_rows: bool) -> Tensor:
    scores = _edited(call.query @ call.key.transpose(-2, -1), edits)
    if zero_rows:
        absent = scores.detach().amax(dim=-1, keepdim=True) == -math.inf
        weights = scores.masked_fill(absent, 0).softmax(dim=-1).masked_fill(absent, 0)
    else:
        weights = scores.softmax(dim=-1)
    weights = F.dropout(weights, call.dropout_p, training=call.dropout_p > 0)
    return weights.to(call.value.dtype) @ call.value


def _with_rows_replaced(
    call: AttentionCall, mask: Tensor, edits: Sequence[Edit], rows: Tensor, attend: Attend, empty: float
) -> Tensor:
    """Where looking would wait for the GPU: the rows' values are put right, whether there are any or not.

    Gradients that would reach queries and keys from such rows, which nobody should look at, may be those of the kernel.
    """
    if mask.dtype != torch.bool:
        # A number that hides all keys alike is in the mask itself.
        absent = mask.detach().amax(dim=-1, keepdim=True) == -math.inf
        out = attend(replace(call, mask=_for_kernel(mask.masked_fill(absent, 0), call.query.dtype)))
        return out * torch.where(absent, empty, 1.0).to(out.dtype)
    # What comes out of these rows is replaced: they must not become NaN on the way.
    out = attend(replace(call, mask=mask | rows))
    absent, last = torch.zeros_like(rows), torch.ones_like(rows)
    for edit in reversed([edit for edit in edits if edit.kind == "keep"]):
        # The last fill of a row that hides everything is what counts.
        hidden = ~edit.by.any(dim=-1, keepdim=True)
        absent = absent | (last & hidden & (edit.fill == -math.inf))
        last = last & ~hidden
    alike = call.value.mean(dim=-2, keepdim=True)
    return torch.where(rows, alike * torch.where(absent, empty, 1.0).to(out.dtype), out)
