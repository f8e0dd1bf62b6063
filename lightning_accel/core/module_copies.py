"""Copies of a module, without side effects or without this package's edits, and modules in the place of others."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_accel.core.kept_state import TORCHS_OWN
from lightning_accel.core.patch import Patch, is_edit

_HOOKS = frozenset(name for name in TORCHS_OWN if "_hooks" in name)


def silent_copy(module: nn.Module, dtype: torch.dtype | None = None, made: dict[int, Any] | None = None) -> Any:
    """Copies a module without its hooks and its rebound ``forward``. Running the copy does not change the module.

    Parameters are shared unless they are converted. Buffers, tensors, lists, dicts, sets and inner modules are copied.

    Args:
        module: Any module.
        dtype: The type to which floating-point parameters and tensors are converted; None for no conversion.
        made: The copies made so far, by the ``id`` of the original.
    """
    made = {} if made is None else made
    if id(module) in made:
        return made[id(module)]
    if isinstance(module, torch.jit.ScriptModule):
        return copy.deepcopy(module) if dtype is None else copy.deepcopy(module).to(dtype)

    def copied(value: Any) -> Any:
        if isinstance(value, list | dict | set):
            return copy.copy(value)
        if not isinstance(value, Tensor):
            return value
        is_converted = dtype is not None and value.is_floating_point()
        if not isinstance(value, nn.Parameter):
            return value.detach().to(dtype, copy=True) if is_converted else value.detach().clone()
        if is_converted and id(value) not in made:  # else it is tied to a converted one
            made[id(value)] = nn.Parameter(value.detach().to(dtype, copy=True), value.requires_grad)
        return made.get(id(value), value)

    def part(held: Any) -> Any:
        return silent_copy(held, dtype, made) if isinstance(held, nn.Module) else copied(held)

    twin = made[id(module)] = copy.copy(module)
    state = vars(twin)
    state.pop("forward", None)
    for name, value in state.items():
        if name in TORCHS_OWN and isinstance(value, dict):  # hooks, parameters, buffers or modules
            state[name] = type(value)({} if name in _HOOKS else {key: part(held) for key, held in value.items()})
        else:
            state[name] = copied(value)
    return twin


def plain_copy(model: nn.Module, without: Mapping[int, Any] | None = None) -> nn.Module:
    """Copies a model in eval mode without the edits of this package. The model itself keeps its edits.

    The copy is on the model's device. Compiled calls are not copied: torch leaves them out of copies.

    Args:
        model: Any module, accelerated or not.
        without: Objects that must not be copied, such as a Trainer: ``id`` of the object → its replacement in the copy.
            This is the memo of :func:`copy.deepcopy`.

    Raises:
        TypeError: The model holds something that cannot be copied.
    """
    while type(model).__name__ == "OptimizedModule":  # the result of torch.compile(model), whose forward has no names
        (model,) = model.children()
    with torch.no_grad():
        copied = copy.deepcopy(model, dict(without or {}))
    for module in copied.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, Patch):
                del vars(module)[name]
            elif is_edit(value) and value.__self__ is module:
                while is_edit(value):  # several techniques may have wrapped the same method
                    value = MethodType(value.__func__.__wrapped__, module)
                if getattr(type(module), name, None) is value.__func__:
                    del vars(module)[name]
                else:
                    vars(module)[name] = value
    return copied.eval()


def exchanged(model: nn.Module, by: Mapping[nn.Module, nn.Module]) -> nn.Module:
    """Replaces modules under all their names. Returns the resulting model."""
    for path, module in list(model.named_modules(remove_duplicate=False)):
        if path and module in by:
            owner, _, name = path.rpartition(".")
            setattr(model.get_submodule(owner), name, by[module])
    return by.get(model, model)
