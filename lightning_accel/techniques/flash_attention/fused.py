"""What takes the place of matched attention in a graph: puts its parts into one form and calls the kernel."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_accel.techniques.flash_attention.call import AttentionCall
from lightning_accel.techniques.flash_attention.masking import Masking, attend_masked
from lightning_accel.techniques.flash_attention.masks import (
    MaskFacts,
    MaskMemory,
    can_look_into,
    causal_fill,
    is_traced,
    look_into,
)
from lightning_accel.techniques.flash_attention.pattern import Order

Shape = tuple[int, ...]
Attend = Callable[[AttentionCall], Tensor]
# Of the original, of the fused form as a function of an `Attend` and the same arguments, and of those arguments.
Rehearse = Callable[[Callable[..., Tensor], Callable[..., Tensor], tuple[Any, ...]], Tensor]


@dataclass(frozen=True)
class Arg:
    """The place of a value among the arguments of :class:`FusedAttention`."""

    index: int


@dataclass(frozen=True)
class MaskSource:
    """A mask as a calculation from few values, to be run only if it must.

    Attributes:
        compute: Gives the mask.
        leaves: What from.
        is_constant: Whether they are the module's own, rather than a caller's.
    """

    compute: Callable[..., Tensor]
    leaves: tuple[Arg, ...]
    is_constant: bool


@dataclass(frozen=True)
class BoundStep:
    """A :class:`~.pattern.Step` whose nodes have become arguments."""

    kind: Literal["scale", "factor", "bias", "keep", "hide"]
    arg: float | Arg | MaskSource
    power: float
    level: int
    order: tuple[int, ...]
    fill: float


@dataclass(frozen=True)
class Recipe:
    """A :class:`~.pattern.Match` whose nodes have become arguments; see there."""

    query_order: Order
    key_order: Order
    value_order: Order
    levels: tuple[tuple[int | Arg, ...], ...]
    steps: tuple[BoundStep, ...]
    weights_level: int
    out_order: tuple[int, ...]
    dropout_p: float
    dtype: torch.dtype
    is_contiguous: bool


class FusedAttention(nn.Module):
    """Attention by a :class:`Recipe`.

    Args:
        recipe: How the parts were arranged.
        attend: Computes an :class:`AttentionCall`.
        original: What was there before, a function of the arguments without those that come twice.
        places: For each argument, its place among those.
        rehearsal: Tells, when asked at a call, whether and by what the call is tried.
    """

    def __init__(
        self,
        recipe: Recipe,
        attend: Attend,
        original: Callable[..., Tensor],
        places: Sequence[int],
        rehearsal: Callable[[], Rehearse | None],
    ) -> None:
        super().__init__()
        self._recipe = recipe
        self._attend = attend
        self._original = original
        self._places = places
        self._rehearsal = rehearsal
        self._memory = MaskMemory()

    @override
    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any) -> Tensor:
        rehearse = self._rehearsal()
        if rehearse is None:
            return self._by_recipe(self._attend, query, key, value, *args)
        each = dict(zip(self._places, (query, key, value, *args), strict=True))

        def fused(attend: Attend, *each: Any) -> Tensor:
            return self._by_recipe(attend, *(each[place] for place in self._places))

        return rehearse(self._original, fused, tuple(each[place] for place in sorted(each)))

    def _by_recipe(self, attend: Attend, query: Tensor, key: Tensor, value: Tensor, *args: Any) -> Tensor:
        recipe = self._recipe
        q, k, v = (
            _arranged(tensor, order)
            for tensor, order in (
                (query, recipe.query_order),
                (key, recipe.key_order),
                (value, recipe.value_order),
            )
        )
        batch = q.shape[:-2]
        # Through reshapes the batch of the values cannot be followed: there it is known to be that of the weights.
        for other in (k, v) if len(recipe.levels) == 1 else (k,):
            if other.shape[:-2] != batch:
                batch = torch.broadcast_shapes(batch, other.shape[:-2])  # type: ignore[no-untyped-call]
        levels = _level_shapes(tuple(batch), recipe.levels, args)
        canonical = next((shape for shape in levels if len(shape) == 2), levels[0])
        masking = Masking(q.shape[-2], k.shape[-2], q.device)
        for step in recipe.steps:
            q = self._take(step, masking, q, levels, canonical, args)
        q, k = _folded(q, levels[0], canonical, whole=True), _folded(k, levels[0], canonical, whole=True)
        v = _folded(v, levels[recipe.weights_level], canonical, whole=True)
        if q.dtype != v.dtype or k.dtype != v.dtype:  # scores in float32 of a bfloat16 model: all in the wider one
            dtype = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
            q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        call = AttentionCall(
            query=q,
            key=k,
            value=v,
            is_causal=masking.causal_fill is not None,
            dropout_p=recipe.dropout_p,
            scale=masking.scale,
            window=masking.window,
        )
        out = attend_masked(call, masking, attend)
        if out.dtype != recipe.dtype:
            out = out.to(recipe.dtype)
        shape = (*levels[recipe.weights_level], *out.shape[-2:])
        out = out if out.shape == shape else out.reshape(shape)
        if recipe.out_order != tuple(range(out.dim())):
            out = out.permute(recipe.out_order)
        return out.contiguous() if recipe.is_contiguous else out

    # -- the steps between product and softmax -----------------------------------------------------------------

    def _take(
        self, step: BoundStep, masking: Masking, q: Tensor, levels: list[Shape], canonical: Shape, args: Sequence[Any]
    ) -> Tensor:
        if step.kind == "scale":
            number: Any = args[step.arg.index] if isinstance(step.arg, Arg) else step.arg
            masking.multiply(float(number) if step.power == 1 else 1 / float(number))
            return q
        level = levels[step.level]
        if step.kind == "factor":
            assert isinstance(step.arg, Arg)
            factor = _mask_arranged(args[step.arg.index], step.order, level)
            return q * factor if step.power == 1 else q / factor
        if step.kind == "bias":
            self._take_bias(step, masking, level, canonical, args)
        else:
            self._take_mask(step, masking, level, canonical, args)
        return q

    def _take_bias(
        self, step: BoundStep, masking: Masking, level: Shape, canonical: Shape, args: Sequence[Any]
    ) -> None:
        if isinstance(step.arg, MaskSource):
            leaves = tuple(args[leaf.index] for leaf in step.arg.leaves)
            fill = self._facts(step, leaves, level, lambda mask: causal_fill(mask * step.power))
            # Two large numbers added up are not what hiding twice is, and scaled they may no longer be large.
            if fill is not None and self._is_only_mask(step) and step is self._recipe.steps[-1]:
                masking.hide_future(fill)
                return
            tensor = step.arg.compute(*leaves)
        else:
            assert isinstance(step.arg, Arg)
            tensor = args[step.arg.index]
        # In integers a difference may wrap round, and booleans do not add up.
        tensor = tensor if tensor.is_floating_point() else tensor.to(torch.get_default_dtype())
        tensor = tensor if step.power == 1 else tensor * step.power
        bias = _mask_folded(tensor, step.order, level, canonical)
        masking.add(bias)

    def _take_mask(
        self, step: BoundStep, masking: Masking, level: Shape, canonical: Shape, args: Sequence[Any]
    ) -> None:
        may_have_empty_rows = True
        if isinstance(step.arg, MaskSource):
            leaves = tuple(args[leaf.index] for leaf in step.arg.leaves)
            facts = self._facts(step, leaves, level, lambda mask: look_into(_keys_kept(mask, step.kind)))
            if isinstance(facts, MaskFacts):
                if facts.hides_nothing:
                    return
                if facts.is_causal:
                    masking.hide_future(step.fill)
                    return
                if facts.window is not None and self._is_only_mask(step):
                    everything = max(masking.rows, masking.columns)
                    left, right = (everything if side is None else side for side in facts.window)
                    masking.window = (left, right)
                    return
                may_have_empty_rows = facts.has_empty_rows
            tensor = step.arg.compute(*leaves)
        else:
            assert isinstance(step.arg, Arg)
            tensor = args[step.arg.index]
        keep = _mask_folded(_keys_kept(tensor, step.kind), step.order, level, canonical)
        masking.hide(keep, step.fill, may_have_empty_rows=may_have_empty_rows)

    def _is_only_mask(self, step: BoundStep) -> bool:
        return all(other is step or other.kind in ("scale", "factor") for other in self._recipe.steps)

    def _facts(self, step: BoundStep, leaves: tuple[Any, ...], level: Shape, look: Callable[[Tensor], Any]) -> Any:
        source = step.arg
        assert isinstance(source, MaskSource)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if is_traced() or not (source.is_constant or all(can_look_into(tensor) for tensor in tensors)):
            return None  # looking waits for the GPU: not worth it for a mask that may be another one every time
        with torch.no_grad():
            return self._memory.recall(
                (id(source), *leaves), lambda: look(_mask_arranged(source.compute(*leaves), step.order, level))
            )


def _keys_kept(mask: Tensor, kind: str) -> Tensor:
    mask = mask if mask.dtype == torch.bool else mask.bool()
    return mask if kind == "keep" else ~mask


# -- shapes ----------------------------------------------------------------------------------------------------


def _arranged(tensor: Tensor, order: Order) -> Tensor:
    """The tensor as (batch…, row, column), with ones for batch dimensions that it lacks."""
    dims = tensor.dim()
    if order == tuple(range(dims)):
        return tensor
    if order == (*range(dims - 2), dims - 1, dims - 2):
        return tensor.transpose(-2, -1)
    tensor = tensor.permute([index for index in order if index is not None])
    for position, index in enumerate(order):
        if index is None:
            tensor = tensor.unsqueeze(position)
    return tensor


def _level_shapes(first: Shape, levels: Sequence[Sequence[int | Arg]], args: Sequence[Any]) -> list[Shape]:
    shapes = [first]
    for sizes in levels[1:]:
        shape = [int(args[size.index]) if isinstance(size, Arg) else size for size in sizes]
        if -1 in shape:
            known = -math.prod(shape)
            shape[shape.index(-1)] = math.prod(shapes[-1]) // known if known else 0
        shapes.append(tuple(shape))
    return shapes


def _folded(tensor: Tensor, level: Shape, canonical: Shape, *, whole: bool = False) -> Tensor:
    """(batch…, row, column), the batch broadcastable to ``level``, as (B, H, row, column) of ``canonical``.

    Args:
        tensor: What to fold.
        level: The batch shape it belongs to.
        canonical: The batch shape that has the same elements, and becomes (B, H).
        whole: Whether B and H must be there in full, rather than as ones to broadcast.
    """
    tail = tensor.shape[-2:]
    pair: Shape = canonical
    if len(canonical) != 2:
        pair = (math.prod(canonical[:-1]), canonical[-1]) if len(canonical) > 2 else (*canonical, *(1, 1))[:2]
    if tensor.shape[:-2] == pair:
        return tensor
    if all(size == 1 for size in tensor.shape[:-2]):
        tensor = tensor.reshape(1, 1, *tail)
    elif level == canonical == pair and tensor.dim() == 4:
        pass
    else:
        tensor = tensor.expand(*level, *tail).reshape(*pair, *tail)
    return tensor.expand(*pair, *tail) if whole else tensor


def _mask_arranged(mask: Tensor, order: tuple[int, ...], level: Shape) -> Tensor:
    """A mask, bias or factor as (batch…, T, S) with ones where it broadcasts."""
    missing = len(level) + 2 - mask.dim()
    if missing:
        mask = mask[(None,) * missing]
    return mask if order == tuple(range(mask.dim())) else mask.permute(order)


def _mask_folded(mask: Tensor, order: tuple[int, ...], level: Shape, canonical: Shape) -> Tensor:
    return _folded(_mask_arranged(mask, order, level), level, canonical)
