"""Private names of autograd: its hooks, its nodes, where a pass is, transforms of functions."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import _C, Tensor
from torch.autograd import Variable, forward_ad


def has_gradient_hooks(tensor: Tensor) -> bool:
    """Whether somebody has registered a hook on its gradient: ``_backward_hooks``, ``_post_accumulate_grad_hooks``.

    Tensors have methods to register such hooks, and none that lists them. Since torch 2.1. Without the second name,
    hooks of that kind are not seen, and FSDP2, which makes another parameter, loses them.
    """
    return bool(tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None))


def saved_tensors_hooks() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """The hooks on saved tensors that are in force: ``_top_saved_tensors_default_hooks``, with its argument torch 2.7.

    Torch tells nobody. Checkpointing and offloading have such hooks, and ``torch.func`` refuses to run where there are
    any. Without it ours cannot give way, and activations are never in place.
    """
    found: tuple[Callable[..., Any], Callable[..., Any]] | None
    found = _C._autograd._top_saved_tensors_default_hooks(True)
    return found


def has_saved_result(node: Any) -> bool:
    """Whether an operator that saves its own result has done so: ``_raw_saved_result``, ``_saved_result``, torch 1.9.

    Documented: https://docs.pytorch.org/docs/stable/notes/autograd.html#saved-tensors
    What it has saved must not be unpacked to find out: under checkpointing that computes a whole block again. So the
    second is asked only where the first shows neither data nor a hook, as is also the case, with an error, once the
    graph was freed. True where a torch has no such names: nothing is then taken for a result that is being saved.
    """
    try:
        saved = node._raw_saved_result
        return saved.data is not None or saved.unpack_hook is not None or node._saved_result is not None
    except (AttributeError, RuntimeError):
        return True


def sequence_number(node: Any) -> int:
    """The place of a node among all that were made: ``_sequence_nr``, since torch 1.11.

    It tells the nodes that one call of a block made. Without it no memory budget can be planned.
    """
    return int(node._sequence_nr())


def is_in_backward() -> bool:
    """Whether autograd is walking a graph on this thread: ``_current_graph_task_id``, since torch 2.0."""
    return _C._current_graph_task_id() != -1


def is_on_foreign_thread() -> bool:
    """Whether Python did not start this thread: ``threading._DummyThread``, since Python 2.

    Those on which autograd computes for GPUs are such ones, and nothing of torch's tells them.
    """
    return isinstance(threading.current_thread(), threading._DummyThread)


def node_under_way() -> int:
    """The place, as :func:`sequence_number`, of the node that autograd computes the gradient of; -1: of none.

    ``_current_autograd_node``, since torch 2.0. Without it a backward pass is not told apart by modules.
    """
    node = _C._current_autograd_node()
    return -1 if node is None else sequence_number(node)


def latest_node() -> int:
    """The place of the node that was made last on this thread: ``torch.autograd._get_sequence_nr``, since torch 2.1.

    Within an operation it is the operation's own. Without it a backward pass is not told apart by modules.
    """
    return int(torch.autograd._get_sequence_nr()) - 1  # type: ignore[attr-defined]


def call_after_backward(callback: Callable[[], Any]) -> None:
    """Has ``callback`` called when the backward pass under way is at its end; to be called from a hook within it.

    DistributedDataParallel averages its last gradients there, so that code after ``loss.backward()`` sees the average.
    Public hooks come before the last gradients are there. Since torch 1.0.
    Without the name: nothing is called, and ``accel_ddp`` averages a little later, after the pass.
    """
    if (engine := getattr(Variable, "_execution_engine", None)) is not None:
        engine.queue_callback(callback)


def is_transformed() -> bool:
    """Whether this is inside a transform of torch.func, or forward-mode differentiation, which count for themselves.

    ``peek_interpreter_stack`` and ``_current_level``, both since torch 2.0; torch has no public question for either.
    Without them the AttributeError goes to the caller, who then leaves things as they are.
    """
    return _C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0
