"""What is done to scores before the softmax, and how it reaches a kernel: as a scale, a band, a mask or a bias.

Masks are looked into once, so that a causal one costs neither memory nor time. Kernels disagree on a query that no key
is left for: zeros, NaN, wrong gradients. Written by hand it is plain: -inf everywhere gives NaN, and a large negative
number everywhere leaves all keys the same weight, or what scores that number still lets through.
"""

from __future__ import annotations

import functools
import itertools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_accel.core.torch_private.tensors import version_of
from lightning_accel.techniques.flash_attention.call import AttentionCall, Band, Edit

Attend = Callable[[AttentionCall], Tensor]

HIDES_BELOW = -9e3  # a score that low has no weight beside scores of any model that trains
# Times eps, a mask's highest value: from here on its last digit is 60 or more, and scores added to it are rounded away.
_SWALLOWS = -60
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
        facts: list[Any] = []
        tensors: list[Tensor] = []
        for source in sources:
            if isinstance(source, Tensor):
                if source.is_inference():  # which keeps no count of what is written to it
                    return find()
                tensors.append(source)
                facts += (id(source), version_of(source), source.data_ptr())
            else:
                facts.append(source)
        key = tuple(facts)
        known = self._known.get(key)
        if known is not None and all(ref() is tensor for ref, tensor in zip(known[0], tensors, strict=True)):
            return known[1]
        if len(self._known) >= _REMEMBERED:
            self._known.clear()
        seen = find()
        self._known[key] = ([weakref.ref(tensor) for tensor in tensors], seen)
        return seen


_memory = MaskMemory()


# -- attention under edits -----------------------------------------------------------------------------------------


def attend_edited(
    call: AttentionCall, edits: Sequence[Edit], attend: Attend, *, zero_rows: bool = False, may_wait: bool = False
) -> Tensor:
    """softmax(edits(query @ key^T)) @ value: (B, H, T, Dv).

    The call has the scale that is in the edits, and no mask; the edits' tensors are broadcastable to (B, H, T, S). With
    ``zero_rows`` a query whose keys are all given -inf gets zeros, instead of NaN. A GPU is waited for to look into a
    mask only if the caller ``may_wait``, whose layers share it: once for all of them.
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
    mask = _merged(call, edits)
    if mask.dtype == torch.bool and len(masks) == 1 and not masks[0].has_empty_rows:
        return attend(replace(call, mask=mask))
    may_read = can_look_into(mask)
    if may_wait and mask.is_cuda and not is_traced(mask):
        may_read = not torch.cuda.is_current_stream_capturing()
    if not may_read:
        return _with_rows_replaced(call, mask, edits, attend, zero_rows)
    sources = (part for edit in edits for part in (edit.kind, edit.by, edit.fill))
    found = _memory.recall((call.query.shape[:3], *sources), lambda: _rows_without_keys(call, mask))
    if found is None:
        return attend(replace(call, mask=_for_kernel(mask, call.query.dtype)))
    rows, dim, some = found
    if call.dropout_p or len(some) == call.query.shape[dim]:  # in two parts, dropout would draw otherwise
        return _by_hand(call, edits, zero_rows)
    # The result for these rows is not used; it must be finite, no more.
    out = attend(replace(call, mask=_for_kernel(_open(mask, rows), call.query.dtype)))
    edits = [replace(edit, by=_part(edit.by, dim, some)) for edit in edits]
    tensors = {
        name: _part(getattr(call, name), dim, some) for name in ("query", "key", "value")[: 3 if dim == 0 else 1]
    }
    return out.index_copy(dim, some, _by_hand(replace(call, **tensors), edits, zero_rows).to(out.dtype))


def scale_of(edits: Sequence[Edit]) -> float:
    """The product of the numbers that scores are multiplied by."""
    return math.prod([edit.by for edit in edits if edit.kind == "multiply"], start=1.0)


def _merged(call: AttentionCall, edits: Sequence[Edit]) -> Tensor:
    """The mask that the edits come to: boolean, or in the precision that scores have what becomes of scores of zero."""
    if all(edit.kind != "add" for edit in edits):
        kept: Iterator[Tensor] = (edit.by for edit in edits if edit.kind == "keep")
        return functools.reduce(torch.logical_and, kept)
    dtypes = (edit.by.dtype for edit in edits if edit.kind == "add")
    dtype = functools.reduce(torch.promote_types, dtypes, call.query.dtype)
    first, *rest = itertools.dropwhile(lambda edit: edit.kind == "multiply", edits)
    if first.kind == "add":
        return _edited(first.by.to(dtype), rest)
    return _edited(torch.zeros((), dtype=dtype, device=call.query.device), [first, *rest])


def _hidden_rows(mask: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        return ~mask.any(dim=-1, keepdim=True)
    # As far off on the other side, too, scores vanish beside it, and kernels lose their way back.
    return mask.detach().amax(dim=-1, keepdim=True).abs() >= -HIDES_BELOW


def _rows_without_keys(call: AttentionCall, mask: Tensor) -> tuple[Tensor, int, Tensor] | None:
    """Queries that see no key, (B, H, T, 1) or broadcastable, and a dimension with the few indices that hold them."""
    rows = _hidden_rows(mask)
    if not rows.any():
        return None
    held = rows.expand(*call.query.shape[:3], 1)
    by_dim = {0: held.flatten(1).any(dim=1), 2: held.any(dim=1).any(dim=0)[:, 0]}  # whole samples, or rows of all
    dim = min(by_dim, key=lambda dim: float(by_dim[dim].float().mean()))
    return rows, dim, by_dim[dim].nonzero()[:, 0]


def _open(mask: Tensor, rows: Tensor) -> Tensor:
    return mask.masked_fill(rows, mask.dtype == torch.bool)


def _part(by: Any, dim: int, some: Tensor) -> Any:
    is_one_for_all = not isinstance(by, Tensor) or by.dim() < 4 or by.shape[dim] == 1
    return by if is_one_for_all else by.index_select(dim, some)


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
            scores = (
                scores + torch.where(edit.by, 0.0, fill).to(scores.dtype)
                if edit.is_added
                else torch.where(edit.by, scores, fill)
            )
    return scores


def _for_kernel(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype in (torch.bool, dtype):
        return mask
    # Under autocast a mask may be float32 where the computation is bfloat16, whose lowest number is a little higher.
    return torch.where(mask == -math.inf, mask, mask.clamp(min=torch.finfo(dtype).min)).to(dtype)


def _by_hand(call: AttentionCall, edits: Sequence[Edit], zero_rows: bool) -> Tensor:
    """As hand-written attention does it: values, gradients, NaN and all."""
    scores = _edited(call.query @ call.key.transpose(-2, -1), edits)
    if zero_rows:
        absent = scores.detach().amax(dim=-1, keepdim=True) == -math.inf
        weights = scores.masked_fill(absent, 0).softmax(dim=-1).masked_fill(absent, 0)
    else:
        weights = scores.softmax(dim=-1)
    weights = F.dropout(weights, call.dropout_p, training=call.dropout_p > 0)
    return weights.to(call.value.dtype) @ call.value


def _with_rows_replaced(
    call: AttentionCall, mask: Tensor, edits: Sequence[Edit], attend: Attend, zero_rows: bool
) -> Tensor:
    """Where nothing can depend on what is in the mask: the rows' values are put right, whether there are any or not.

    Gradients that would reach queries and keys from such rows, which nobody should look at, are left out.
    """
    kept = [edit for edit in edits if edit.kind == "keep"]
    # What masked scores are multiplied by: numbers that were added before count as they were then.
    scale = abs(scale_of(list(itertools.dropwhile(lambda edit: edit.kind == "multiply", edits))))
    if mask.dtype == torch.bool:
        rows = _hidden_rows(mask)
        if scale > 1 or len({(edit.fill, edit.is_added) for edit in kept}) > 1:
            # Keys that are given the highest of several numbers share the weight, unless it overflows.
            scores = _edited(call.query.new_zeros(()), edits)
            highest = scores.amax(dim=-1, keepdim=True)
            mask, absent = scores == highest, highest == -math.inf
            del scores  # several times as large as the mask
        else:
            mask, absent = _open(mask, rows), rows & (kept[0].fill == -math.inf)
    else:
        eps = torch.finfo(mask.dtype).eps
        if any(edit.fill * eps > _SWALLOWS * max(scale, 1) for edit in kept if not edit.is_added):
            # A row may hold such numbers in the place of scores, beside scores that still count: no kernel has that.
            return _by_hand(call, edits, zero_rows)
        highest = mask.detach().amax(dim=-1, keepdim=True)
        rows, absent = highest * eps <= _SWALLOWS * scale, highest == -math.inf
        mask = (mask - highest.where(highest <= HIDES_BELOW, 0)).masked_fill_(absent, 0)
    query = call.query.masked_fill(rows, 0)  # without one the mask alone says what the weights are
    out = attend(replace(call, query=query, mask=_for_kernel(mask, query.dtype)))
    return out * torch.where(absent, 0.0 if zero_rows else math.nan, 1.0).to(out.dtype)
