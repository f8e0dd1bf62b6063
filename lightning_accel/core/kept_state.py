"""Functions that keep one kind of state each: names, tensor values, items of containers, what training changes.

Each function keeps the present state and returns a function that restores it, once or several times. That function
yields the paths of what had changed.
"""

from __future__ import annotations

import copy
import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_accel.core.patch import is_edit
from lightning_accel.core.tree import map_leaves, storage_of

Names = dict[str, Any]
"""Names that a step may rebind: the attributes of an object or the buffers of a module."""

Restore = Callable[[], Iterable[str]]

TORCHS_OWN = frozenset(vars(nn.Module())) | {"forward", "track_running_stats"}
"""Attributes of a module that no snapshot keeps: torch's own, and those that trials set and reset themselves."""

_ABSENT = object()


def can_be_restored(value: Any) -> TypeGuard[Tensor]:
    """Returns whether ``value`` is a tensor that can be copied, compared and written to, as most buffers can."""
    if not isinstance(value, Tensor) or is_lazy(value):
        return False
    if value.layout != torch.strided or value.is_nested or value.is_meta or value.is_inference():
        return False
    return not any(size > 1 and step == 0 for size, step in zip(value.shape, value.stride(), strict=True))  # expanded


def joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def keep_names(places: Sequence[tuple[str, Names]]) -> Restore:
    """Keeps which objects the names in each dict refer to, and the order of names. Skips edits of this package."""
    kept = list(map(dict.copy, [names for _, names in places]))  # runs at every step: map() saves Python calls

    def restore() -> Iterator[str]:
        for (path, names), before in zip(places, kept, strict=True):
            fixed = {n for each in (names, before) for n, value in each.items() if n in TORCHS_OWN or is_edit(value)}
            now = [name for name in {**before, **names} if name not in fixed]
            changed = [name for name in now if names.get(name, _ABSENT) is not before.get(name, _ABSENT)]
            has_lost = any(name not in names for name in changed)
            for name in changed:
                if name in before:
                    names[name] = before[name]
                else:
                    del names[name]
                yield joined(path, name)
            if has_lost:  # else a restored name comes last, in another order for state_dict()
                for name in [name for name in before if name in names]:
                    names[name] = names.pop(name)

    return restore


def keep_values(
    tensors: Iterable[tuple[str, Tensor]], copies_on: torch.device | None = None, *, packed: bool = False
) -> Restore:
    """Keeps and compares the values of tensors: batch norm kernels write statistics without a new version number.

    Copies are stored on ``copies_on``. If ``packed``, one kernel copies all tensors of a dtype and rank: every step
    does this with the statistics of all norm layers.
    """
    kinds: defaultdict[Any, list[tuple[str, Tensor]]] = defaultdict(list)
    for path, tensor in tensors:
        kinds[(type(tensor), tensor.dtype, tensor.device, tensor.ndim) if packed else len(kinds)].append((path, tensor))
    copies = [
        _packed([tensor for _, tensor in alike]) if packed else _copied(alike[0][1], copies_on)
        for alike in kinds.values()
    ]

    def restore() -> Iterator[str]:
        for alike, copied in zip(kinds.values(), copies, strict=True):
            values = torch.split(copied, [tensor.numel() for _, tensor in alike]) if packed else [copied]
            for (path, tensor), value in zip(alike, values, strict=True):
                if not _same_values(tensor, value := value.view_as(tensor).to(tensor.device)):
                    tensor.copy_(value)
                    yield path

    return restore


def keep_items(containers: Iterable[tuple[str, Any]], appended: Iterable[tuple[str, Any]] = ()) -> Restore:
    """Keeps the items of lists, dicts and sets without copying the items. Of ``appended`` lists, keeps the lengths."""
    kept: list[tuple[str, Any, Any]] = [(path, container, copy.copy(container)) for path, container in containers]
    kept += [(path, found, len(found)) for path, found in appended]

    def restore() -> Iterator[str]:
        for path, container, before in kept:
            items = container[:before] if isinstance(before, int) else before
            if not _same_items(container, items):
                container.clear()
                container.extend(items) if isinstance(container, list) else container.update(items)
                yield path

    return restore


def keep_training(module: nn.Module, optimizers: Iterable[Optimizer], copies_on: torch.device | None = None) -> Restore:
    """Keeps parameters, gradients and optimizer states. Optimizer states are restored as new tensors.

    With ``copies_on``, gradients are too: holding the old ones would fill memory that is being measured.
    """

    def again(tensor: Tensor) -> Callable[[], Tensor]:
        return functools.partial(_copied, _copied(tensor, copies_on), tensor.device)

    # Without a reference to their memory: whoever is to move it asks whether others have one.
    parameters = [(p, _address_of(p), again(p)) for p in module.parameters() if not is_lazy(p)]
    gradients = [
        (p, p.grad if copies_on is None else None, again(p.grad)) for p, *_ in parameters if p.grad is not None
    ]
    states = [(one.state, {p: map_leaves(again, each, Tensor) for p, each in one.state.items()}) for one in optimizers]

    def restore() -> Iterable[str]:
        for parameter, address, value in parameters:
            parameter.grad = None
            kept = value()
            is_alike = (parameter.shape, parameter.dtype) == (kept.shape, kept.dtype)
            # Other strides mean that a layout edit was undone in the meantime.
            if is_alike and (parameter.stride() != kept.stride() or _address_of(parameter) == address):
                parameter.copy_(kept)
            else:
                parameter.data = kept
        for parameter, gradient, value in gradients:
            parameter.grad = value() if gradient is None else gradient.copy_(value())
        for state, before in states:
            state.clear()
            state.update({p: map_leaves(lambda value: value(), each, functools.partial) for p, each in before.items()})
        return ()

    return restore


def _address_of(tensor: Tensor) -> int:
    storage = storage_of(tensor)
    return 0 if storage is None else storage.data_ptr()


def _packed(tensors: list[Tensor]) -> Tensor:
    if tensors[0].ndim == 0:
        return torch.stack(tensors).detach()
    return torch.cat(tensors if tensors[0].ndim == 1 else [one.reshape(-1) for one in tensors]).detach()


def _copied(tensor: Tensor, device: torch.device | None) -> Tensor:
    tensor = tensor.detach()
    return tensor.clone() if device in (None, tensor.device) else tensor.to(device, copy=True)


def _same_values(now: Tensor, before: Tensor) -> bool:
    """Returns whether all elements are equal. Here NaN equals NaN: a buffer may hold it until it is first written."""
    if torch.equal(now, before):
        return True
    return now.is_floating_point() and torch.allclose(now, before, rtol=0, atol=0, equal_nan=True)


def _same_items(now: Any, before: Any) -> bool:
    """Returns whether two containers hold the same objects. ``==`` would compare tensors element by element."""
    if isinstance(now, set):  # a copy of a set may have another order
        return {*map(id, now)} == {*map(id, before)}
    if isinstance(now, dict):
        now, before = ([part for pair in items.items() for part in pair] for items in (now, before))
    return len(now) == len(before) and all(a is b for a, b in zip(now, before, strict=True))
