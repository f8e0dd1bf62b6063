"""Every name of torch's own that the library uses, one function each; nothing else in it has a leading underscore.

A function says why it is needed, since which torch the name is known, and what is done where it is missing. What a new
torch has dropped then fails in one test of tests/core/test_torch_private.py, which says in plain words what broke.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree

# -- strategies, resilience, lightning -----------------------------------------------------------------------------


def call_after_backward(callback: Callable[[], Any]) -> None:
    """Has ``callback`` called when the backward pass under way is at its end; to be called from a hook within it.

    DistributedDataParallel averages its last gradients there, so that code after ``loss.backward()`` sees the average.
    Public hooks come before the last gradients are there. Since torch 1.0.
    Without the name: nothing is called, and ``accel_ddp`` averages a little later, after the pass.
    """
    if (engine := getattr(Variable, "_execution_engine", None)) is not None:
        engine.queue_callback(callback)


def check_all_reduced(wrapped: DistributedDataParallel) -> None:
    """Raises a ``RuntimeError`` after a backward pass in which parameters that DDP waits for got no gradient.

    Publicly DDP says so in the next step, when the optimizer has stepped with what was not averaged. Since torch 2.1.
    Without the name: it is left to the next step.
    """
    if (check := getattr(wrapped, "_check_reducer_finalized", None)) is not None:
        check()


def has_gradient_hooks(parameter: Tensor) -> bool:
    """Whether somebody has registered a hook on its gradient: FSDP2 makes another parameter, and loses it.

    Tensors have methods to register such hooks, and none that lists them. Since torch 2.1.
    Without the names: False, and such a hook is lost silently.
    """
    return bool(getattr(parameter, "_backward_hooks", None) or getattr(parameter, "_post_accumulate_grad_hooks", None))


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copies many tensors at the cost of one call: every step keeps the running statistics of all norms.

    Since torch 2.1. Without the name: one copy after another.
    """
    if (copy_together := getattr(torch, "_foreach_copy_", None)) is not None and targets:
        copy_together(list(targets), list(sources))
        return
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def reset_method(module: nn.Module) -> Callable[[], Any] | None:
    """What initialises a module's own parameters; None where it has no such method.

    Torch's layers have ``reset_parameters()``, except nn.MultiheadAttention and nn.Transformer, which underline it.
    Without the name: None, and such a layer on the meta device is refused as one without initial values.
    """
    method = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    return method if callable(method) else None


def init_weights_method(module: nn.Module) -> Callable[[nn.Module], Any] | None:
    """What initialises the modules within a model: the convention of transformers, whose models write it themselves.

    Without the name: None, and only :func:`reset_method` counts.
    """
    method = getattr(module, "_init_weights", None)
    return method if callable(method) else None


def map_parts(function: Callable[[int, Any], Any], data: Any, structure: Any) -> Any:
    """``data`` with ``function(number, part)`` in place of each part that stands where ``structure`` has a leaf.

    Lightning flattens nested loaders with this module, and their order is that of its leaves. Since torch 1.8.
    Without the name: an ``ImportError``; it would have got a public name.
    """
    _, spec = _pytree.tree_flatten(structure)
    parts = [function(number, part) for number, part in enumerate(spec.flatten_up_to(data))]
    return _pytree.tree_unflatten(parts, spec)
