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


def eager_call(module: nn.Module | type[nn.Module]) -> Callable[..., Any]:
    """A module's call, its hooks included, past whatever was compiled: ``_call_impl``, since torch 1.6.

    Of the class: the function whose frame lies between a caller and a forward pass.
    """
    return module._call_impl


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def hooks_of(module: nn.Module) -> tuple[dict[int, Any], ...]:
    """A module's own forward hooks, forward pre-hooks, backward hooks and backward pre-hooks, each by its handle.

    Whoever hooks a module sees its inputs and outputs, and torch can only add hooks, not list them. Known since torch
    2.0; where one is missing (a module may answer for its own attributes), as if it were empty.
    """
    return tuple(vars(module).get(name) or {} for name in _HOOKS)


# -- modules ---------------------------------------------------------------------------------------------------------


def module_slots(module: nn.Module) -> dict[str, nn.Module | None]:
    """The dict behind ``add_module``: ``_modules``, since torch 0.1, as for parameters."""
    return module._modules


# -- who holds a tensor, who sees operations -----------------------------------------------------------------------


def has_gradient_hooks(tensor: Tensor) -> bool:
    """Whether somebody has registered a hook on its gradient: ``_backward_hooks``, since torch 0.2.

    Tensors have methods to register such hooks, and none that lists them. Where it is missing, the AttributeError goes
    to the caller, who then leaves things as they are.
    """
    return bool(tensor._backward_hooks)


handles_on_tensor: Callable[[Tensor], int] = getattr(Tensor, "_use_count", lambda tensor: 0)
"""How many hold a tensor from C++: ``_use_count``, since torch 2.1; nothing else shows what autograd or DLPack holds.

Where it is missing, 0 of every tensor, by which nobody can be told to hold one: then activations are never in place.
"""


def handles_on_storage(storage: torch.UntypedStorage) -> int:
    """How many tensors and others hold memory: ``_storage_Use_Count``, since torch 2.1, of ``_cdata``.

    Where it is missing, the AttributeError goes to the caller, who then leaves the memory alone.
    """
    return _C._storage_Use_Count(storage._cdata)


def has_modes() -> bool:
    """Whether dispatch or function modes see every operation: lengths of two stacks, since torch 2.0.

    TorchDynamo captures nothing, or anew, under them. Without the names every captured attention runs as it was
    written, for the reason that the AttributeError gives.
    """
    return bool(_C._len_torch_dispatch_stack() or _C._len_torch_function_stack())


def is_transformed() -> bool:
    """Whether this is inside a transform of torch.func, or forward-mode differentiation, which count for themselves.

    ``peek_interpreter_stack`` and ``_current_level``, both since torch 2.0; torch has no public question for either.
    Without them the AttributeError goes to the caller, who then leaves things as they are.
    """
    return _C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


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
