"""Modules that plain Python attributes hold as well: lists, dicts, closures. What they do with them cannot be seen."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

_OWN = frozenset({"_modules", "_parameters", "_buffers"})
# Lightning's own references: they lead to the whole run.
_FRAMEWORK = frozenset({"_trainer", "_fabric", "_fabric_optimizers", "_hparams", "_hparams_initial"})
_MAX_DEPTH = 4
_MAX_OBJECTS = 20_000


def held_by_plain_attributes(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Every module of ``model`` that an attribute holds outside ``_modules``, and ``"Class.attribute"``."""
    members = {id(module) for module in model.modules()}
    seen: set[int] = set()
    for module in model.modules():
        for name, value in vars(module).items():
            if name in _OWN or name in _FRAMEWORK or name == "forward" or name.endswith("_hooks"):
                continue
            for held in _modules_in(value, members, seen, _MAX_DEPTH):
                yield held, f"{type(module).__name__}.{name}"


def _modules_in(value: Any, members: set[int], seen: set[int], depth: int) -> Iterator[nn.Module]:
    if isinstance(value, nn.Module):
        if id(value) in members:
            yield value
        return
    if depth == 0 or id(value) in seen or len(seen) > _MAX_OBJECTS:
        return
    parts = _parts(value)
    if parts:
        seen.add(id(value))
        for part in parts:
            yield from _modules_in(part, members, seen, depth - 1)


def _parts(value: Any) -> Iterable[Any]:
    if value is None or isinstance(value, str | bytes | int | float | torch.Tensor | type | types.ModuleType):
        return ()
    if isinstance(value, Mapping):
        return [*value.keys(), *value.values()]
    if isinstance(value, list | tuple | set | frozenset):
        return list(value)
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, types.MethodType):
        return [value.__self__]
    if isinstance(value, types.FunctionType):
        cells = [cell for cell in value.__closure__ or () if _is_filled(cell)]
        defaults = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        return [*(cell.cell_contents for cell in cells), *defaults]
    if type(value).__module__.startswith(("torch.", "lightning", "pytorch_lightning", "builtins")):
        return ()
    return list(getattr(value, "__dict__", {}).values())


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False
