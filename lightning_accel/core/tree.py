"""Tensors wherever they sit: in tuples, lists, dicts, namedtuples, dataclasses, nested as a user's batch may be."""

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
    """``data`` with every tensor replaced by ``function(tensor)``; frozen dataclasses and unknown objects stay."""
    return map_leaves(function, data, Tensor)


def map_leaves(function: Callable[[Any], Any], data: Any, kind: type | tuple[type, ...]) -> Any:
    """``data`` with every object of class ``kind`` replaced by ``function(object)``, as :func:`map_tensors` does."""
    if isinstance(data, kind):
        return function(data)
    if type(data) in _ATOMS or isinstance(data, _NO_CONTAINERS):
        return data
    # What nearly all data are made of, without the checks for all the rest: this is done at every step.
    if type(data) is tuple or type(data) is list:
        return type(data)([map_leaves(function, part, kind) for part in data])
    if type(data) is dict:
        return {key: map_leaves(function, part, kind) for key, part in data.items()}
    return apply_to_collection(data, dtype=kind, function=function, allow_frozen=True)


def leaves(data: Any) -> list[Any]:
    """Everything in ``data`` that is no container: tensors, numbers, objects of classes that are not known here."""
    if isinstance(data, Tensor) or type(data) in _ATOMS:
        return [data]
    if type(data) is tuple or type(data) is list:  # by themselves: the checks below take longer than the rest
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


# What a call cannot change, or (tensors) is seen to change; a batch or cache object of the user's can be.
_PLAIN = (Tensor, type(None), int, float, complex, str, bytes, Enum, torch.dtype, torch.device, nn.Module, FunctionType)


def changeable_argument(args: Any, kwargs: Any) -> str | None:
    """The class of an argument that a call may change (a key/value cache), so that a second call differs; or None."""
    return next((type(leaf).__name__ for leaf in leaves((args, kwargs)) if not isinstance(leaf, _PLAIN)), None)


def tensors_in(data: Any) -> list[Tensor]:
    """Every tensor in ``data``, in the order of its structure."""
    return [leaf for leaf in leaves(data) if isinstance(leaf, Tensor)]


def storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """The storage behind ``tensor``; None where there is none: it is lazy, sparse, or made by ``torch.func``.

    A storage is the same object as long as it lives, whichever tensor is asked for it, and equal to no other: sets and
    weak dictionaries take it.
    """
    try:
        return tensor.untyped_storage()
    except (RuntimeError, ValueError):
        return None


def storages_of(tensors: Iterable[Tensor]) -> set[torch.UntypedStorage]:
    return {storage for storage in map(storage_of, tensors) if storage is not None}


def unique_bytes(tensors: Iterable[Tensor]) -> int:
    """The bytes of the storages behind ``tensors``, each counted once."""
    return sum(storage.nbytes() for storage in storages_of(tensors))
