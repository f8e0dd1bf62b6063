"""The kinds of state that a snapshot keeps: names, values of tensors, items of containers, what training changes.

Each function keeps one kind as it is now, and returns a function that brings it back. The caller may bring it back
several times. Each time it gets the paths of what had changed, if they are known without a pass over large tensors.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_accel.core.patch import is_edit
from lightning_accel.core.tree import map_leaves

Names = dict[str, Any]
"""What a step may rebind: the attributes of an object, the buffers of a module."""

Restore = Callable[[], Iterable[str]]

TORCHS_OWN = frozenset(vars(nn.Module())) | {"forward", "track_running_stats"}
"""Attributes of a module that no snapshot keeps: torch's own, and those that trials set and reset by themselves."""

_ABSENT = object()


def can_be_restored(value: Any) -> TypeGuard[Tensor]:
    """Whether ``value`` is a tensor that can be copied, compared and written to, as most buffers can."""
    if not isinstance(value, Tensor) or is_lazy(value):
        return False
    if value.layout != torch.strided or value.is_nested or value.is_meta or value.is_inference():
        return False
    return not any(size > 1 and step == 0 for size, step in zip(value.shape, value.stride(), strict=True))  # expanded


def joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def keep_names(places: Sequence[tuple[str, Names]]) -> Restore:
    """Keeps which objects the names in each dict stand for, and their order. Edits of this package are not kept.

    Whoever has made an edit undoes it.
    """
    kept = [names.copy() for _, names in places]

    def restore() -> Iterator[str]:
        for (path, names), before in zip(places, kept, strict=True):
            fixed = {n for each in (names, before) for n, value in each.items() if n in TORCHS_OWN or is_edit(value)}
            changed = [n for n in {**before, **names} if names.get(n, _ABSENT) is not before.get(n, _ABSENT)]
            changed = [name for name in changed if name not in fixed]
            has_lost = any(name not in names for name in changed)
            for name in changed:
                if name in before:
                    names[name] = before[name]
                else:
                    del names[name]
                yield joined(path, name)
            if has_lost:  # a name that was deleted and set again comes last: state_dict() would have another order
                for name in [name for name in before if name in names]:
                    names[name] = names.pop(name)

    return restore


def keep_values(tensors: Sequence[tuple[str, Tensor]], copies_on: torch.device | None = None) -> Restore:
    """Keeps the values of tensors, with their paths. Copies wait on ``copies_on``; None for each tensor's own device.

    Values are compared, not version counters, as batch norm's kernels write statistics and do not count that.
    """
    kept = [(path, tensor, _copied(tensor, copies_on)) for path, tensor in tensors]

    def restore() -> Iterator[str]:
        for path, tensor, value in kept:
            if not torch.equal(tensor, value := value.to(tensor.device)):
                tensor.copy_(value)
                yield path

    return restore


def keep_packed(tensors: Sequence[Tensor]) -> Restore:
    """Keeps the values of small tensors, by one copying kernel for a dtype: there are statistics of many norms."""
    kinds: defaultdict[Any, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        kinds[type(tensor), tensor.dtype, tensor.device].append(tensor)
    copies = [torch.cat([tensor.detach().reshape(-1) for tensor in alike]) for alike in kinds.values()]

    def restore() -> Iterable[str]:
        for alike, values in zip(kinds.values(), copies, strict=True):
            for tensor, value in zip(alike, torch.split(values, [tensor.numel() for tensor in alike]), strict=True):
                tensor.copy_(value.view_as(tensor))
        return ()

    return restore


def keep_contents(containers: Iterable[tuple[str, Any]]) -> Restore:
    """Keeps the items of lists, dicts and sets, with their paths. The items themselves are not copied."""
    kept = [(path, container, copy.copy(container)) for path, container in containers]

    def restore() -> Iterator[str]:
        for path, container, contents in kept:
            if not _same_items(container, contents):
                container.clear()
                container.extend(contents) if isinstance(container, list) else container.update(contents)
                yield path

    return restore


def keep_lengths(lists: Iterable[list[Any]]) -> Restore:
    """Keeps the lengths of lists that a step appends to. A copy of a long list would take too long."""
    kept = [(appended, len(appended)) for appended in lists]

    def restore() -> Iterable[str]:
        for appended, length in kept:
            del appended[length:]
        return ()

    return restore


def keep_parameters(module: nn.Module, copies_on: torch.device | None = None) -> Restore:
    """Keeps the values and gradients of a module's parameters. Lazy parameters without values are left out.

    A gradient's value goes back into its own tensor. With ``copies_on`` it goes into a new tensor, as a snapshot that
    holds the old one would fill memory that is being measured.
    """
    kept = []
    for parameter in module.parameters():
        if not is_lazy(parameter):
            gradient = parameter.grad
            copied = None if gradient is None else _copied(gradient, copies_on)
            values = parameter.data, _copied(parameter, copies_on)
            kept.append((parameter, *values, gradient if copies_on is None else None, copied))

    def restore() -> Iterable[str]:
        for parameter, data, value, gradient, copied in kept:
            parameter.data = data
            parameter.copy_(value)
            if copied is not None:
                copied = _copied(copied, parameter.device) if gradient is None else gradient.copy_(copied)
            parameter.grad = copied
        return ()

    return restore


def keep_optimizer_state(optimizer: Optimizer, copies_on: torch.device | None = None) -> Restore:
    """Keeps what an optimizer holds for each parameter, moments for example. The values go into new tensors."""
    kept = {
        parameter: map_leaves(lambda tensor: _TensorCopy(tensor, copies_on), values, Tensor)
        for parameter, values in optimizer.state.items()
    }

    def restore() -> Iterable[str]:
        optimizer.state.clear()
        for parameter, values in kept.items():
            optimizer.state[parameter] = map_leaves(_TensorCopy.again, values, _TensorCopy)
        return ()

    return restore


class _TensorCopy:
    """The value of a tensor, and the device that it belongs to."""

    def __init__(self, tensor: Tensor, device: torch.device | None) -> None:
        self._value, self._device = _copied(tensor, device), tensor.device

    def again(self) -> Tensor:
        return _copied(self._value, self._device)


def _copied(tensor: Tensor, device: torch.device | None) -> Tensor:
    tensor = tensor.detach()
    return tensor.clone() if device in (None, tensor.device) else tensor.to(device, copy=True)


def _same_items(now: Any, before: Any) -> bool:
    """Whether two containers hold the very same objects; ``==`` would ask tensors, which answer with tensors."""
    if isinstance(now, dict):
        now, before = ([part for pair in items.items() for part in pair] for items in (now, before))
    return len(now) == len(before) and all(a is b for a, b in zip(now, before, strict=True))
