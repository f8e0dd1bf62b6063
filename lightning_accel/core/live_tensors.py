"""Finds the tensors that a program holds between training steps, as far as its module and callbacks lead to them."""

from __future__ import annotations

import functools
import itertools
import sys
import types
from collections import deque
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from lightning_accel.core.kept_state import TORCHS_OWN
from lightning_accel.core.torch_private.modules import hooks_of
from lightning_accel.core.user_frames import is_users

MOST = 20_000
"""The largest number of values that are inspected. More would take longer than a step."""

# Objects of these packages lead to the whole run and hold no tensors of the user's own.
_HANDLES = frozenset(("torch", "lightning", "pytorch_lightning", "lightning_fabric", "lightning_accel", "logging"))
_CONTAINERS = (list, tuple, set, frozenset, deque)
_ATOMS = frozenset((str, bytes, int, float, bool, complex, type(None), type, types.ModuleType))


def held_tensors(*roots: tuple[str, Any], most: int = MOST) -> Iterator[tuple[str, Tensor]]:
    """Yields every tensor that can be reached from ``roots`` once, with its path: ``self.pool.images[3]``.

    Paths lead through attributes, containers, hooks, closures and the global variables of the user's code.

    At most ``most`` values are inspected, in total and in each container.

    Raises:
        LookupError: At the end, if there are more values, or if inspecting a value raised an error.
    """
    waiting: deque[tuple[str, Any]] = deque(roots)
    seen: dict[int, Any] = {}  # keeps the objects, so that no id is reused
    failure = ""
    while waiting and len(seen) < most:
        name, value = waiting.popleft()
        if type(value) in _ATOMS or id(value) in seen:
            continue
        seen[id(value)] = value
        try:
            if isinstance(value, Tensor):
                yield name, value
            elif not isinstance(value, type):
                waiting.extend(_parts(name, value, most))
        except Exception as error:  # a user's property may raise anything
            failure = failure or f"{name} raised {type(error).__name__}: {error}"
    if failure or waiting:
        raise LookupError(failure or f"more than {most:,} values are held")


def _parts(name: str, value: Any, most: int) -> Iterator[tuple[str, Any]]:
    # Names only values that may hold others: naming a whole vocabulary takes longer than a step.
    if isinstance(value, dict):
        items = itertools.islice(dict.items(value), most)
        yield from [(f"{name}[{key!r}]", part) for key, part in items if type(part) not in _ATOMS]
    elif isinstance(value, _CONTAINERS):
        parts = enumerate(itertools.islice(value, most))
        yield from [(f"{name}[{at}]", part) for at, part in parts if type(part) not in _ATOMS]
        if len(value) > most:
            raise LookupError(f"it has more than {most:,} parts")
    elif isinstance(value, types.FunctionType):
        yield from _closure(name, value)
    elif isinstance(value, types.MethodType):
        yield from ((name, value.__self__), (name, value.__func__))
    elif isinstance(value, functools.partial):
        yield from ((name, part) for part in (value.func, value.args, value.keywords))
    elif isinstance(value, nn.Module) or _is_users(type(value)):
        if isinstance(value, nn.Module):
            own = (value.named_children(), value.named_parameters(recurse=False), value.named_buffers(recurse=False))
            yield from ((f"{name}.{slot}", part) for slots in own for slot, part in slots)
            yield from ((f"hooks of {name}", hooks) for hooks in hooks_of(value) if hooks)
        for attribute, part in list(getattr(value, "__dict__", {}).items()):
            if not (isinstance(value, nn.Module) and attribute in TORCHS_OWN):
                yield f"{name}.{attribute}", part
        for kind in type(value).__mro__ if _is_users(type(value)) else ():
            yield from ((f"{name}.{slot}", getattr(value, slot, None)) for slot in slots_of(kind))
            yield from _code(kind)


def _code(kind: type) -> Iterator[tuple[str, Any]]:
    """Yields the attributes of a user's class, and the closure and global variables of its methods."""
    if not _is_written_by_the_user(kind.__module__):
        return
    for attribute, part in list(vars(kind).items()):
        if isinstance(part, types.FunctionType):
            yield from _closure(f"{kind.__name__}.{attribute}", part)
        elif not attribute.startswith("__"):
            yield f"{kind.__name__}.{attribute}", part


def _closure(name: str, function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    if function.__module__.partition(".")[0] in _HANDLES:
        return
    for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield f"{variable} of {name}", content_of(cell)
    if not _is_written_by_the_user(function.__module__):  # globals of libraries lead to all imports
        return
    for variable in function.__code__.co_names:
        if variable in function.__globals__:
            yield variable, function.__globals__[variable]


def content_of(cell: types.CellType) -> Any:
    """Returns the content of a closure's cell; None if the name is not bound yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def slots_of(kind: type) -> tuple[str, ...]:
    """Returns the ``__slots__`` that this very class declares, without ``__dict__`` and ``__weakref__``."""
    slots = vars(kind).get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


def _is_written_by_the_user(module: str) -> bool:
    file = getattr(sys.modules.get(module), "__file__", None)
    return module == "__main__" or (file is not None and is_users(file))


def _is_users(kind: type) -> bool:
    module = kind.__module__.partition(".")[0]
    return module not in _HANDLES and module != "builtins"
