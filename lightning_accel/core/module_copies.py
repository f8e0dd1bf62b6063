"""Copies of a module: one that runs in its place unseen, and one as its author wrote it."""

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


def silent_copy(module: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """Copies a module without its hooks and its rebound ``forward``; a run of the copy changes nothing of the module.

    Parameters are shared unless they are converted. Buffers, tensors, lists, dicts, sets and inner modules are copied.

    Args:
        module: Any module.
        dtype: What floating-point parameters and tensors are converted to; None for no conversion.
    """
    return _silent(module, dtype, {})


def _silent(module: nn.Module, dtype: torch.dtype | None, made: dict[int, Any]) -> nn.Module:
    if id(module) in made:
        known: nn.Module = made[id(module)]
        return known
    if isinstance(module, torch.jit.ScriptModule):
        return copy.deepcopy(module) if dtype is None else copy.deepcopy(module).to(dtype)

    def converted(tensor: Tensor) -> Tensor:
        is_wanted = dtype is not None and tensor.is_floating_point()
        return tensor.detach().to(dtype, copy=True) if is_wanted else tensor.detach().clone()

    def part(original: nn.Module | Tensor | None) -> Any:
        if isinstance(original, nn.Module):
            return _silent(original, dtype, made)
        if not isinstance(original, nn.Parameter):
            return None if original is None else converted(original)
        if dtype is None or not original.is_floating_point():
            return original
        if id(original) not in made:  # it may be tied
            made[id(original)] = nn.Parameter(converted(original), original.requires_grad)
        return made[id(original)]

    copied = made[id(module)] = copy.copy(module)
    state = vars(copied)
    state.pop("forward", None)
    for name, value in state.items():
        if name in _HOOKS:
            state[name] = type(value)()
        elif isinstance(value, Tensor):
            state[name] = converted(value)
        elif name in TORCHS_OWN and isinstance(value, dict):  # of parameters, of buffers or of modules
            state[name] = type(value)((key, part(held)) for key, held in value.items())
        elif isinstance(value, list | dict | set):
            state[name] = copy.copy(value)
    return copied


def plain_copy(model: nn.Module, without: Mapping[int, Any] | None = None) -> nn.Module:
    """Copies a model in eval mode, without the edits of this package; the model, perhaps in a run, keeps its edits.

    The copy is on the model's device. Compiled calls are not copied: torch leaves them out of copies.

    Args:
        model: Any module, accelerated or not.
        without: What takes the place of an object in the copy, by the object's ``id``, as in the memo of
            :func:`copy.deepcopy`: of a Trainer, say, which is not to be copied.

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
                _rebind(module, name, value)
    return copied.eval()


def _rebind(module: nn.Module, name: str, method: Any) -> None:
    """Gives a module the method that the author had bound to this name: techniques wrap each other's edits."""
    while is_edit(method):
        method = MethodType(method.__func__.__wrapped__, module)
    if getattr(type(module), name, None) is method.__func__:
        del vars(module)[name]
    else:
        vars(module)[name] = method
