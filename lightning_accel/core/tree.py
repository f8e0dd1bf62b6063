"""Finds and replaces tensors in nested data: tuples, lists, dicts, namedtuples, dataclasses, as in batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from types import FunctionType
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

_ATOMS = frozenset({type(None), bool, int, float, str})
_NO_CONTAINERS = (str, bytes, bytearray, memoryview, range)


def map_tensors(function: Callable[[Tensor], Tensor], data: Any) -> Any:
    """Returns ``data`` with ``function`` applied to every tensor. Frozen dataclasses and unknown objects stay."""
    return map_leaves(function, data, Tensor)


def map_leaves(function: Callable[[Any], Any], data: Any, kind: type | tuple[type, ...]) -> Any:
    """Returns ``data`` with ``function`` applied to every object of class ``kind``, as :func:`map_tensors` does."""
    if isinstance(data, kind):
        return function(data)
    if type(data) in _ATOMS or isinstance(data, _NO_CONTAINERS):
        return data
    # A fast path for the common containers: this runs at every step.
    if type(data) is tuple or type(data) is list:
        return type(data)([map_leaves(function, part, kind) for part in data])
    if type(data) is dict:
        return {key: map_leaves(function, part, kind) for key, part in data.items()}
    return apply_to_collection(data, dtype=kind, function=function, allow_frozen=True)


def leaves(data: Any) -> list[Any]:
    """Returns everything in ``data`` that is not a container: tensors, numbers, objects of unknown classes."""
    if isinstance(data, Tensor) or type(data) in _ATOMS:
        return [data]
    if type(data) is tuple or type(data) is list:  # a fast path: the checks below are slow
        parts: Any = data
    elif isinstance(data, Mapping):
        parts = data.values()
    elif isinstance(data, Sequence | set | frozenset) and not isinstance(data, _NO_CONTAINERS):
        parts = data
    elif is_dataclass(data) and not isinstance(data, type):
        parts = [getattr(data, field.name, None) for field in fields(data)]
    else:
        return [data]
    return [leaf for part in parts for leaf in leaves(part)]


# A call cannot change these, or the change is noticed (tensors). It can change a user's batch or cache object.
_PLAIN = (Tensor, type(None), int, float, complex, str, bytes, Enum, torch.dtype, torch.device, nn.Module, FunctionType)


def changeable_argument(args: Any, kwargs: Any) -> str | None:
    """Returns the class of an argument that a call may change, such as a key/value cache; None if there is none."""
    return next((type(leaf).__name__ for leaf in leaves((args, kwargs)) if not isinstance(leaf, _PLAIN)), None)


def tensors_in(data: Any) -> list[Tensor]:
    """Returns every tensor in ``data``, in the order of its structure."""
    return [leaf for leaf in leaves(data) if isinstance(leaf, Tensor)]


def storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """Returns the storage of ``tensor``; None if it has none: it is lazy, sparse, or made by ``torch.func``.

    Every tensor on a storage returns the same object while the storage lives, and it equals no other: sets and weak
    dictionaries can hold it.
    """
    try:
        return tensor.untyped_storage()
    except (RuntimeError, ValueError):
        return None


def storages_of(tensors: Iterable[Tensor]) -> set[torch.UntypedStorage]:
    return {storage for storage in map(storage_of, tensors) if storage is not None}


def unique_bytes(tensors: Iterable[Tensor]) -> int:
    """Returns the bytes of the storages behind ``tensors``, each counted once."""
    return sum(storage.nbytes() for storage in storages_of(tensors))
