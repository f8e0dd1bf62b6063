"""A model as its author wrote it: a copy on which what this package has edited is undone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

import torch
from torch import nn

from lightning_accel.core.patch import Patch

_OURS = "lightning_accel."


def plain_copy(model: nn.Module, without: Mapping[int, Any] | None = None) -> nn.Module:
    """A copy in eval mode, on the CPU or wherever the model is, whose forwards are the author's own.

    What techniques have rebound on instances is taken off the copy; the model, in the middle of a run perhaps, keeps
    it. Compiled calls stay behind by themselves: torch leaves them out of copies.

    Args:
        model: Any module, accelerated or not.
        without: As the memo of :func:`copy.deepcopy`: by ``id``, what takes the place of an object in the copy. A
            Trainer, say, which is not to be copied.

    Raises:
        TypeError: The model holds something that cannot be copied.
    """
    while type(model).__name__ == "OptimizedModule":  # what torch.compile() has made, whose forward has no names
        (model,) = model.children()
    with torch.no_grad():
        copied = copy.deepcopy(model, dict(without or {}))
    for module in copied.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, Patch):
                del vars(module)[name]
            elif isinstance(value, MethodType) and value.__self__ is module and _is_ours(value.__func__):
                _restore(module, name, value.__func__)
    return copied.eval()


def _is_ours(function: Callable[..., Any]) -> bool:
    return function.__module__.startswith(_OURS) and hasattr(function, "__wrapped__")


def _restore(module: nn.Module, name: str, function: Any) -> None:
    while _is_ours(function):  # techniques that have rebound the same method stand on each other
        function = function.__wrapped__
    if getattr(type(module), name, None) is function:
        del vars(module)[name]
    else:
        vars(module)[name] = MethodType(function, module)
