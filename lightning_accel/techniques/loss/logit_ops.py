"""What only moves logits about: views, masks of tokens and wider dtypes, done to the head's input in their place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import EllipsisType
from typing import Any, TypeAlias

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class LogitOp:
    """Logits by what they would be computed from."""

    rows: Tensor  # the head's input, with the same views taken of it, features in the place of classes
    class_dim: int
    like: Tensor  # on the meta device, with the logits' shape, strides and dtype


Rule: TypeAlias = "Callable[[LogitOp, Any, Sequence[Any], Mapping[str, Any]], LogitOp | None]"


def rearranged(place: LogitOp, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> LogitOp | None:
    """Where ``func(logits, *args, **kwargs)`` has its values from; None: it is more than a move.

    Mistakes raise what they would raise, in ``func`` itself. What changes nothing gives ``place`` back.
    """
    rule = _RULES.get(func)
    return None if rule is None else rule(place, func, args, kwargs)


def _reshaped(place: LogitOp, func: Any, args: Any, kwargs: Any) -> LogitOp | None:
    if place.class_dim != place.like.dim() - 1 or any(isinstance(arg, torch.dtype) for arg in args):
        return None
    like = func(place.like, *args, **kwargs)
    if like.dim() == 0 or like.shape[-1] != place.like.shape[-1] or like.dtype != place.like.dtype:
        return None
    rows = place.rows.reshape(*like.shape[:-1], place.rows.shape[-1])
    return LogitOp(rows, like.dim() - 1, like)


def _permuted(place: LogitOp, func: Any, args: Any, kwargs: Any) -> LogitOp | None:
    like = func(place.like, *args, **kwargs)
    # Dimensions of different sizes show where each of them went.
    sizes = range(2, place.like.dim() + 2)
    went = func(torch.empty(*sizes, device="meta"), *args, **kwargs)
    rows = func(place.rows, *args, **kwargs)
    return LogitOp(rows, went.shape.index(sizes[place.class_dim]), like)


def _indexed(place: LogitOp, func: Any, args: Any, kwargs: Any) -> LogitOp | None:
    item = args[0]
    num_dims, class_dim = place.like.dim(), place.class_dim
    if type(item) is Tensor:  # a mask of tokens
        if item.dtype != torch.bool or item.dim() >= num_dims or class_dim != num_dims - 1:
            return None
        rows = place.rows[item]
        like = torch.empty(*rows.shape[:-1], place.like.shape[-1], dtype=place.like.dtype, device="meta")
        return LogitOp(rows, like.dim() - 1, like)
    items = item if isinstance(item, tuple) else (item,)
    if not all(type(one) in (int, slice, EllipsisType) for one in items):
        return None
    at = next((n for n, one in enumerate(items) if one is ...), len(items))
    before, after = items[:at], items[at + 1 :]
    full = (*before, *(slice(None),) * (num_dims - len(before) - len(after)), *after)
    if len(full) != num_dims or full[class_dim] != slice(None):
        return None
    like, rows = place.like[full], place.rows[full]
    num_gone = sum(type(one) is int for one in full[:class_dim])
    return LogitOp(rows, class_dim - num_gone, like)


def _cast(place: LogitOp, func: Any, args: Any, kwargs: Any) -> LogitOp | None:
    dtype = _CASTS.get(func)
    if dtype is None:
        given = [*args, *(value for name, value in kwargs.items() if name != "non_blocking")]
        if len(given) != 1 or not kwargs.keys() <= {"dtype", "device", "non_blocking"}:
            return None
        is_device = func is Tensor.to and isinstance(given[0], str | torch.device)
        if is_device and _is_on(place.rows.device, torch.device(given[0])):
            return place
        if not isinstance(given[0], torch.dtype):
            return None
        dtype = given[0]
    if dtype == place.like.dtype:
        return place
    # Into a wider one only: nothing may be lost on the way to the loss.
    if torch.promote_types(dtype, place.like.dtype) != dtype or dtype not in (torch.float32, torch.float64):
        return None
    return LogitOp(place.rows, place.class_dim, place.like.to(dtype))


def _moved(place: LogitOp, func: Any, args: Any, kwargs: Any) -> LogitOp | None:
    wanted = torch.device("cpu" if func is Tensor.cpu else "cuda")
    return None if args or kwargs or not _is_on(place.rows.device, wanted) else place


def _is_on(device: torch.device, wanted: torch.device) -> bool:
    return wanted.type == device.type and torch.empty(0, device=wanted).device == device


def _cloned(place: LogitOp, func: Any, args: Any, kwargs: Any) -> LogitOp | None:
    return None if args or kwargs else replace(place)


def _contiguous(place: LogitOp, func: Any, args: Any, kwargs: Any) -> LogitOp | None:
    like = func(place.like, *args, **kwargs)
    return place if like is place.like else LogitOp(place.rows, place.class_dim, like)


def getters(*names: str) -> list[Any]:
    """What ``__torch_function__`` is given where these attributes of a tensor are read."""
    return [getattr(Tensor, name).__get__ for name in names if hasattr(Tensor, name)]


_CASTS: dict[Any, torch.dtype] = {Tensor.float: torch.float32, Tensor.double: torch.float64}
_RULES: dict[Any, Rule] = {
    **dict.fromkeys((Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten), _reshaped),
    **dict.fromkeys((Tensor.unsqueeze, torch.unsqueeze, Tensor.squeeze, torch.squeeze), _reshaped),
    **dict.fromkeys((Tensor.transpose, torch.transpose, Tensor.permute, torch.permute, *getters("mT")), _permuted),
    **dict.fromkeys((Tensor.movedim, torch.movedim, Tensor.swapaxes, torch.swapaxes), _permuted),
    **dict.fromkeys((*_CASTS, Tensor.to, Tensor.type), _cast),
    **dict.fromkeys((Tensor.clone, torch.clone), _cloned),
    **dict.fromkeys((Tensor.cpu, Tensor.cuda), _moved),
    Tensor.__getitem__: _indexed,
    Tensor.contiguous: _contiguous,
}
