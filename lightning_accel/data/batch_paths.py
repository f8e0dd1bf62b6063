"""Which part of a batch a transform acts on: named by a key, or evident from what the batch holds."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import FrozenInstanceError, fields, is_dataclass
from typing import Any

import numpy as np
import torch

from lightning_accel.core.checks import nearest

Path = tuple[Any, ...]  # the keys, indices and field names that lead from the batch to the part
Key = str | int | tuple[str | int, ...]

_FLOATS = ("float16", "bfloat16", "float32", "float64")


def parts_of(batch: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Everything in ``batch`` that is no container, with the way there."""
    if isinstance(batch, Mapping):
        inner: Iterator[tuple[Any, Any]] = iter(batch.items())
    elif isinstance(batch, list | tuple):
        inner = enumerate(batch)
    elif is_dataclass(batch) and not isinstance(batch, type):
        inner = ((field.name, getattr(batch, field.name, None)) for field in fields(batch))
    else:
        yield path, batch
        return
    for key, value in inner:
        yield from parts_of(value, (*path, key))


def get(batch: Any, path: Path) -> Any:
    """The part at ``path``; a LookupError where there is none."""
    for key in path:
        if isinstance(batch, Mapping | list | tuple) and not (isinstance(key, str) and hasattr(batch, "_fields")):
            try:
                batch = batch[key]
            except TypeError as error:
                raise LookupError(key) from error
        elif isinstance(key, str) and hasattr(batch, key):
            batch = getattr(batch, key)
        else:
            raise LookupError(key)
    return batch


def put(batch: Any, path: Path, value: Any) -> Any:
    """A batch like ``batch`` with ``value`` at ``path``; the containers on the way there are copied, not changed."""
    if not path:
        return value
    key, rest = path[0], path[1:]
    inner = put(get(batch, (key,)), rest, value)
    if isinstance(batch, tuple):
        parts = [*batch]
        parts[batch._fields.index(key) if isinstance(key, str) else key] = inner  # type: ignore[attr-defined]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    try:
        batch = copy.copy(batch)
    except TypeError:  # of a mapping that is only to be read
        batch = dict(batch)
    if isinstance(batch, Mapping) or not isinstance(key, str):
        batch[key] = inner
    else:
        try:
            setattr(batch, key, inner)
        except FrozenInstanceError:  # the copy is ours
            object.__setattr__(batch, key, inner)
    return batch


def named(batch: Any, key: Key, asker: str) -> Path:
    """The path that ``key`` names; a ValueError where there is nothing, a TypeError where that is no tensor."""
    path = key if isinstance(key, tuple) else (key,)
    try:
        part = get(batch, path)
    except LookupError:
        keys = [str(place[0]) for place, _ in parts_of(batch) if place]
        hint = nearest(key, keys) if isinstance(key, str) else ""
        raise ValueError(f"{asker}: the batch has no {_name(path)}{hint or '.'} It has {described(batch)}.") from None
    if not is_array(part):
        raise TypeError(f"{asker}: {_name(path)} of the batch is of type {type(part).__name__}, not a tensor.")
    return path


def find_image(batch: Any, asker: str, key: Key | None = None) -> Path:
    """What ``key`` names, or the one part of four dimensions that holds uint8 or floating-point numbers."""
    if key is not None:
        return named(batch, key, asker)
    found = [path for path, part in _arrays(batch) if part.ndim == 4 and kind_of(part) in ("uint8", *_FLOATS)]
    return _the_one(found, batch, asker, "image", "one part (N, C, H, W) or (N, H, W, C) of uint8 or floating point")


def find_features(batch: Any, asker: str, key: Key | None = None) -> Path:
    """What ``key`` names, or the one image, or the one part of two dimensions or more, of floating-point numbers."""
    if key is not None:
        path = named(batch, key, asker)
        if not is_floating(get(batch, path)):
            kind = kind_of(get(batch, path))
            raise TypeError(f"{asker}: the numbers are {kind}; it takes floating point. Put Normalize before it.")
        return path
    floating = [(path, part.ndim) for path, part in _arrays(batch) if part.ndim >= 2 and kind_of(part) in _FLOATS]
    images = [path for path, ndim in floating if ndim == 4]
    found = images if len(images) == 1 else [path for path, _ in floating]
    return _the_one(found, batch, asker, "part to act on", "one part of floating point and two dimensions or more")


def find_label(batch: Any, asker: str, image: Path, num_classes: int | None, key: Key | None = None) -> Path:
    """What ``key`` names, or the one part with an integer, or else ``num_classes`` probabilities, for each image."""
    if key is not None:
        return named(batch, key, asker)
    samples = len(get(batch, image))
    hard, soft = [], []
    for path, part in _arrays(batch):
        if path == image or part.ndim not in (1, 2) or len(part) != samples:
            continue
        if part.ndim == 1 and "int" in kind_of(part):
            hard.append(path)
        elif part.ndim == 2 and kind_of(part) in _FLOATS and num_classes in (None, part.shape[1]):
            soft.append(path)
    # Without a count, hard labels could not be used; beside probabilities they would be something else.
    found = soft or hard if num_classes is None else hard or soft
    expected = "one part (N,) of integers, or (N, num_classes) of probabilities"
    return _the_one(found, batch, asker, "label", expected, key="label_key")


def is_array(part: Any) -> bool:
    """Whether it is a tensor, or an array of NumPy or CuPy."""
    return isinstance(part, torch.Tensor | np.ndarray) or hasattr(part, "__cuda_array_interface__")


def kind_of(part: Any) -> str:
    """The name of its dtype, alike for tensors and arrays: ``"float32"``."""
    return str(part.dtype).removeprefix("torch.")


def is_floating(part: Any) -> bool:
    """Whether it is a tensor or an array of floating-point numbers."""
    return is_array(part) and "float" in kind_of(part)


def described(batch: Any) -> str:
    """What a batch holds, in words for an error: ``[0]: uint8 (8, 3, 32, 32), [1]: int64 (8,)``."""
    found = []
    for path, part in parts_of(batch):
        what = f"{kind_of(part)} {tuple(part.shape)}" if is_array(part) else type(part).__name__
        found.append(f"{_name(path)}: {what}" if path else what)
    return ", ".join(found) or "nothing"


def _arrays(batch: Any) -> list[tuple[Path, Any]]:
    return [(path, part) for path, part in parts_of(batch) if is_array(part)]


def _the_one(found: list[Path], batch: Any, asker: str, what: str, expected: str, key: str = "key") -> Path:
    if len(found) == 1:
        return found[0]
    held = f"{len(found)} parts could be it" if found else "none is"
    raise ValueError(
        f"{asker}: which part of the batch is the {what} is not evident: expected {expected}, and {held} among"
        f" {described(batch)}. Name it with {key}= (a key of a dict, an index of a tuple, or a path of both)."
    )


def _name(path: Path) -> str:
    return "".join(f"[{key!r}]" for key in path)
