"""What takes the place of matched attention in a graph: puts its parts into one form and calls the kernel."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from lightning_accel.techniques.flash_attention.call import AttentionCall, AttentionForm, Edit, Order
from lightning_accel.techniques.flash_attention.graph import is_tensor, value
from lightning_accel.techniques.flash_attention.masks import (
    CAUSAL,
    Attend,
    MaskMemory,
    attend_edited,
    band_of,
    can_look_into,
    causal_fill,
    is_traced,
    scale_of,
)

Shape = tuple[int, ...]
# Given the original, the fused form as a function of an `Attend` and the same arguments, and those arguments.
Compute = Callable[[Callable[..., Tensor], Callable[..., Tensor], tuple[Any, ...]], Tensor]


@dataclass(frozen=True)
class MaskSource:
    """A mask as a calculation from few values, to be run only if it must. A constant one has the module's own."""

    compute: Callable[..., Tensor]
    leaves: list[Node]
    is_constant: bool


@dataclass(frozen=True)
class _Plan:
    """What follows from the shapes that a call gives, and from its numbers."""

    levels: list[Shape]  # the batch shapes that scores and weights go through
    pair: Shape  # (B, H)
    is_ready: list[bool]  # of query, key and value, whether it is (B, H, row, column) as it is given
    edits: list[Edit]  # by numbers, or by nodes that give tensors
    scale: float
    dropout_p: float


@dataclass(eq=False)
class FusedAttention:
    """Attention of a form, whose nodes are given at a call."""

    form: AttentionForm
    inputs: list[Node]  # what a call gives the values of
    sources: dict[Node, MaskSource]  # those masks that are calculated from inputs
    original: Callable[..., Tensor]  # what was there before, as a function of the inputs
    layout: tuple[int, ...] | None  # the dimensions from the outermost in memory on, where that makes a difference
    compute: Compute
    _memory: MaskMemory = field(default_factory=MaskMemory)

    def __post_init__(self) -> None:
        # Steps of a training give the same shapes, and on a GPU the kernels wait for each of these calculations.
        self._known_plan = functools.lru_cache(maxsize=64)(self._plan)
        self._dtype = value(self.form.last).dtype
        self._operands = [(*self.form.query, 0), (*self.form.key, 0), (*self.form.value, -1)]  # with their levels

    def call(self, *args: Any) -> Tensor:
        return self.compute(self.original, self._fused, args)

    def _plan(self, *facts: Any) -> _Plan:
        """Plans a call whose inputs have these shapes, or are these numbers."""
        form, given = self.form, dict(zip(self.inputs, facts, strict=True))
        shapes = [_arranged_shape(given[node], order) for node, order, _ in self._operands]
        # Through reshapes the batch of the values is known to be that of the weights.
        batches = [shape[:-2] for shape in (shapes if len(form.levels) == 1 else shapes[:2])]
        levels = _level_shapes(tuple(torch.broadcast_shapes(*batches)), form.levels, given)  # type: ignore[no-untyped-call]
        pair = _pair(next((shape for shape in levels if len(shape) == 2), levels[0]))
        is_ready = [
            _is_in_order(order) and len(shape) == 4 and levels[level] == pair == shape[:-2]
            for (_, order, level), shape in zip(self._operands, shapes, strict=True)
        ]
        edits = [_with_number(edit, given) for edit in form.edits]
        dropout_p = float(given.get(form.dropout_p, form.dropout_p))
        scale = scale_of([edit for edit in edits if not is_tensor(edit.by)])
        return _Plan(levels, pair, is_ready, edits, scale, dropout_p)

    def _fused(self, attend: Attend, *args: Any) -> Tensor:
        form, given = self.form, dict(zip(self.inputs, args, strict=True))
        is_seen_by_compiler = is_traced(given[form.query[0]])  # which has symbols for sizes
        plan_of = self._plan if is_seen_by_compiler else self._known_plan
        plan = plan_of(*[arg.shape if isinstance(arg, Tensor) else arg for arg in args])
        levels, pair = plan.levels, plan.pair
        q, k, v = (
            given[node] if is_ready else _folded(_arranged(given[node], order), levels[level], pair, whole=True)
            for (node, order, level), is_ready in zip(self._operands, plan.is_ready, strict=True)
        )
        edits = []
        for index, edit in enumerate(plan.edits):
            if not is_tensor(edit.by):
                edits.append(edit)
            elif edit.kind in ("multiply", "divide"):
                by = _folded(_mask_arranged(given[edit.by], edit.order, levels[edit.level]), levels[edit.level], pair)
                q = q * by if edit.kind == "multiply" else q / by
            else:
                edits += self._bound(index, edit, given, levels[edit.level], pair, may_look=not is_seen_by_compiler)
        if not q.dtype == k.dtype == v.dtype:  # scores in float32 of a bfloat16 model: all in the wider one
            dtype = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
            q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        call = AttentionCall(query=q, key=k, value=v, dropout_p=plan.dropout_p, scale=plan.scale)
        out = attend_edited(call, edits, attend, zero_rows=form.zero_rows)
        if out.dtype != self._dtype:
            out = out.to(self._dtype)
        if levels[-1] != pair:
            out = out.reshape(*levels[-1], *out.shape[-2:])
        if not _is_in_order(form.out_order):
            out = out.permute(form.out_order)
        if self.layout is None:
            return out
        back = sorted(range(out.dim()), key=self.layout.__getitem__)
        return out.permute(self.layout).contiguous().permute(back)

    def _bound(
        self, index: int, edit: Edit, given: dict[Node, Any], level: Shape, pair: Shape, *, may_look: bool
    ) -> list[Edit]:
        """The edit with its tensor, (B, H, T, S) or broadcastable; none if it hides nothing."""
        source = self.sources.get(edit.by)
        if source is None:
            mask = given[edit.by]
        else:
            compute = source.compute
            leaves = [given[leaf] for leaf in source.leaves]
            is_worth_it = source.is_constant or can_look_into(*[leaf for leaf in leaves if isinstance(leaf, Tensor)])
            # Looking waits for a GPU: not worth it for a mask that may be another one every time.
            if is_worth_it and may_look and (edit.kind != "add" or self._is_alone(edit)):
                unseen = edit

                def look() -> Edit:
                    with torch.no_grad():
                        return _seen(unseen, _mask_arranged(compute(*leaves), unseen.order, level))

                edit = self._memory.recall((index, *leaves), look)
            if edit.kind == "band":
                return [edit] if edit.by != (None, None) else []
            mask = compute(*leaves)
        if edit.kind == "add":
            # In integers a difference may wrap round, and booleans do not add up.
            mask = mask if mask.is_floating_point() else mask.to(torch.get_default_dtype())
            mask = mask if edit.factor == 1 else mask * edit.factor
        else:
            mask = _keys_kept(mask, edit)
        kind: Any = "add" if edit.kind == "add" else "keep"
        return [replace(edit, kind=kind, by=_folded(_mask_arranged(mask, edit.order, level), level, pair))]

    def _is_alone(self, edit: Edit) -> bool:
        # Two large numbers added up are not what hiding twice is, and scaled they may no longer be large.
        edits = self.form.edits
        return all(other.kind in ("multiply", "divide") for other in edits[:-1]) and edit is edits[-1]


def _with_number(edit: Edit, given: dict[Node, Any]) -> Edit:
    """The edit by the number that it is given, if it scales by one; else as it is."""
    if edit.kind not in ("multiply", "divide") or is_tensor(edit.by):
        return edit
    by = float(given.get(edit.by, edit.by))
    return Edit("multiply", by if edit.kind == "multiply" else 1 / by)


def _seen(edit: Edit, mask: Tensor) -> Edit:
    """The edit, as a look into its mask shows it: a band, or whether it may leave a query without keys."""
    if edit.kind == "add":
        fill = causal_fill(mask * edit.factor)
        return edit if fill is None else Edit("band", CAUSAL, fill)
    keep = _keys_kept(mask, edit)
    band = band_of(keep)
    if band is not None:
        return Edit("band", band, edit.fill)
    return replace(edit, has_empty_rows=not bool(keep.any(dim=-1).all()))


def _keys_kept(mask: Tensor, edit: Edit) -> Tensor:
    return mask.bool() if edit.kind == "keep" else ~mask.bool()


# -- shapes --------------------------------------------------------------------------------------------------------


def _arranged(tensor: Tensor, order: Order) -> Tensor:
    """The tensor as (batch…, row, column), with ones for batch dimensions that it lacks."""
    if _is_in_order(order):
        return tensor
    tensor = tensor.permute([index for index in order if index is not None])
    for position, index in enumerate(order):
        if index is None:
            tensor = tensor.unsqueeze(position)
    return tensor


def _arranged_shape(shape: torch.Size, order: Order) -> Shape:
    return tuple(1 if index is None else shape[index] for index in order)


@functools.cache
def _is_in_order(order: Order) -> bool:
    return order == tuple(range(len(order)))


def _level_shapes(first: Shape, levels: Sequence[Sequence[Any]], given: dict[Node, Any]) -> list[Shape]:
    shapes = [first]
    for sizes in levels[1:]:
        shape = [int(given.get(size, size)) for size in sizes]
        if -1 in shape:
            known = -math.prod(shape)
            shape[shape.index(-1)] = math.prod(shapes[-1]) // known if known else 0
        shapes.append(tuple(shape))
    return shapes


def _pair(batch: Shape) -> Shape:
    """The batch shape as (B, H)."""
    return (math.prod(batch[:-1]), batch[-1]) if len(batch) > 2 else (*batch, 1, 1)[:2]


def _folded(tensor: Tensor, level: Shape, pair: Shape, *, whole: bool = False) -> Tensor:
    """(batch…, row, column), the batch broadcastable to ``level``, as (B, H, row, column), whole or broadcastable."""
    tail = tensor.shape[-2:]
    if tensor.dim() == 4 and level == pair == tensor.shape[:-2]:
        return tensor
    if all(size == 1 for size in tensor.shape[:-2]):
        tensor = tensor.reshape(1, 1, *tail)
    elif level != pair or tensor.dim() != 4:
        tensor = tensor.expand(*level, *tail).reshape(*pair, *tail)
    return tensor.expand(*pair, *tail) if whole else tensor


def _mask_arranged(mask: Tensor, order: Sequence[int], level: Shape) -> Tensor:
    """A mask, bias or factor as (batch…, T, S) with ones where it broadcasts."""
    arranged: Tensor = mask[(None,) * (len(level) + 2 - mask.dim())]
    return arranged.permute(*order)
