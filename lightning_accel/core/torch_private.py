"""Every name of torch's own that the library uses, one function each; nothing else in it has a leading underscore.

A function says why it is needed, since which torch the name is known, and what is done where it is missing. What a new
torch has dropped then fails in one test of tests/core/test_torch_private.py, which says in plain words what broke.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import _C, Tensor, nn
from torch.autograd import forward_ad

# -- calls of modules ----------------------------------------------------------------------------------------------


def eager_call(target: nn.Module | type[nn.Module]) -> Any:
    """``_call_impl`` of a module or of the class: its call as it is without ``module.compile()``, hooks and all.

    Its frame lies between a caller and a forward pass, and compiled calls go round it. Known since torch 1.7; where it
    is missing, ``__call__`` itself.
    """
    return getattr(target, "_call_impl", target.__call__)


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def hooks_of(module: nn.Module) -> tuple[dict[int, Any], ...]:
    """A module's own forward hooks, forward pre-hooks, backward hooks and backward pre-hooks, each by its handle.

    Whoever hooks a module sees its inputs and outputs, and torch can only add hooks, not list them. Known since torch
    2.0; where one is missing (a module may answer for its own attributes), as if it were empty.
    """
    return tuple(vars(module).get(name) or {} for name in _HOOKS)


# -- who holds a tensor, who sees operations -----------------------------------------------------------------------


def has_gradient_hooks(tensor: Tensor) -> bool:
    """Whether ``tensor.register_hook`` was called: ``_backward_hooks``, since torch 0.2; torch cannot be asked."""
    return tensor._backward_hooks is not None


handles_on_tensor: Callable[[Tensor], int] = getattr(Tensor, "_use_count", lambda tensor: 0)
"""How many hold a tensor from C++: ``_use_count``, since torch 2.1; nothing else shows what autograd or DLPack holds.

Where it is missing, 0 of every tensor, by which nobody can be told to hold one: then activations are never in place.
"""


def handles_on_storage(storage: torch.UntypedStorage) -> int:
    """How many tensors and others hold memory: ``_storage_Use_Count``, since torch 2.1, of ``_cdata``.

    Where it is missing, the AttributeError goes to the caller, who then leaves the memory alone.
    """
    return _C._storage_Use_Count(storage._cdata)


def operations_are_watched() -> bool:
    """Whether somebody sees, or transforms, every operation: a mode, a transform of torch.func, forward mode.

    Torch has no public question for any of the four, known since torch 2.0. Where one is missing, so is what it asks
    for: the AttributeError goes to the caller, who then leaves things as they are.
    """
    return bool(
        _C._len_torch_dispatch_stack()
        or _C._len_torch_function_stack()
        or _C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
    )


def saved_tensors_are_packed() -> bool:
    """Whether ``saved_tensors_hooks`` are in force (checkpointing, offloading), which torch does not say publicly.

    ``_top_saved_tensors_default_hooks`` with its argument since torch 2.7.
    """
    return _C._autograd._top_saved_tensors_default_hooks(True) is not None


# -- attention -----------------------------------------------------------------------------------------------------


def register_constant(kind: type[Any]) -> None:
    """Has Dynamo take objects of a class for constants, as ``torch.utils._pytree.register_constant`` since torch 2.7.

    Dynamo of torch 2.11 takes no key of a dict that is a string by inheritance. Where it is missing, nothing is done:
    models of transformers are then captured with graph breaks.
    """
    register = getattr(torch.utils._pytree, "register_constant", None)
    if register is not None:
        register(kind)
