"""Private names of autograd: hooks, nodes, the state of a pass, function transforms."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import _C, Tensor
from torch.autograd import Variable, forward_ad


def has_gradient_hooks(tensor: Tensor) -> bool:
    """Returns whether a gradient hook is registered: ``_backward_hooks``, ``_post_accumulate_grad_hooks``.

    Tensors have methods to register such hooks, but none to list them. Since torch 2.1. Without the second name, hooks
    of that kind are not seen, and FSDP2, which creates a new parameter, loses them.
    """
    return bool(tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None))


def saved_tensors_hooks() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """Returns the active hooks on saved tensors: ``_top_saved_tensors_default_hooks``, with its argument torch 2.7.

    No public function tells. Checkpointing and offloading have such hooks, and ``torch.func`` refuses to run if there
    are any. Without the name, our hooks cannot give way, and activations are never changed in place.
    """
    found: tuple[Callable[..., Any], Callable[..., Any]] | None
    found = _C._autograd._top_saved_tensors_default_hooks(True)
    return found


def has_saved_result(node: Any) -> bool:
    """Returns whether an operator has saved its own result: ``_raw_saved_result``, ``_saved_result``, since torch 1.9.

    Documented: https://docs.pytorch.org/docs/stable/notes/autograd.html#saved-tensors
    The result must not be unpacked for this check: under checkpointing that recomputes a whole block. So the second
    name is read only if the first has neither data nor a hook. This is also so after the graph was freed, where reading
    raises. Returns True if torch lacks the names: then no tensor is taken for a result that is being saved.
    """
    try:
        saved = node._raw_saved_result
        return saved.data is not None or saved.unpack_hook is not None or node._saved_result is not None
    except (AttributeError, RuntimeError):
        return True


def sequence_number(node: Any) -> int:
    """Returns a node's number in the order of creation: ``_sequence_nr``, since torch 1.11.

    It tells which nodes one call of a block created. Without it no memory budget can be planned.
    """
    return int(node._sequence_nr())


def is_in_backward() -> bool:
    """Returns whether autograd is in a backward pass on this thread: ``_current_graph_task_id``, since torch 2.0."""
    return _C._current_graph_task_id() != -1


def is_on_foreign_thread() -> bool:
    """Returns whether this thread was not started by Python: Python calls it ``Dummy-1``, or another number.

    The threads on which autograd computes for GPUs are such threads. Torch has no name that tells them.
    """
    return threading.current_thread().name.startswith("Dummy-")


def node_under_way() -> int:
    """Returns the :func:`sequence_number` of the node that autograd is computing; -1 if there is none.

    ``_current_autograd_node``, since torch 2.0. Without it, backward time cannot be attributed to modules.
    """
    node = _C._current_autograd_node()
    return -1 if node is None else sequence_number(node)


def latest_node() -> int:
    """Returns the number of the newest node of this thread: ``torch.autograd._get_sequence_nr``, since torch 2.1.

    Inside an operation this is the operation's own node. Without it, backward time cannot be attributed to modules,
    and memory cannot be planned block by block.
    """
    return int(torch.autograd._get_sequence_nr()) - 1  # type: ignore[attr-defined]


def call_after_backward(callback: Callable[[], Any]) -> None:
    """Calls ``callback`` at the end of the current backward pass. Call this from a hook inside that pass.

    DistributedDataParallel averages its last gradients there, so that code after ``loss.backward()`` sees the average.
    Public hooks run before the last gradients exist. Since torch 1.0. Without the name nothing is called, and
    ``accel_ddp`` averages slightly later, after the pass.
    """
    if (engine := getattr(Variable, "_execution_engine", None)) is not None:
        engine.queue_callback(callback)


def is_transformed() -> bool:
    """Returns whether this is inside a transform of torch.func or forward-mode differentiation.

    ``peek_interpreter_stack`` and ``_current_level``, both since torch 2.0; there is no public function. Without them
    the AttributeError reaches the caller, who then changes nothing.
    """
    return _C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0
