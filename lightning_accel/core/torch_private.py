"""Every name of torch's own that the library uses, one function each; nothing else in it has a leading underscore.

A function says why it is needed, since which torch the name is known, and what is done where it is missing. What a new
torch has dropped then fails in one test of tests/core/test_torch_private.py, which says in plain words what broke.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

# -- saved tensors ---------------------------------------------------------------------------------------------------


def version_of(tensor: Tensor) -> int:
    """How often ``tensor`` was changed in place: ``_version``, since torch 0.4.

    Autograd compares it for what it saves, and so must whoever saves in its stead. Without it nothing is offloaded.
    """
    return tensor._version


def set_version(tensor: Tensor, version: int) -> None:
    """Sets what :func:`version_of` counts: ``_unsafe_set_version_counter``, a tuple of tensors since torch 2.6.

    Nothing else tells whether two tensors share a counter but to move one and put it back.
    """
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


def base_of(tensor: Tensor) -> Tensor | None:
    """What ``tensor`` is a view of: ``_base``, since torch 0.4. It tells the views of parameters that FSDP gathers."""
    return tensor._base


def saved_tensors_hooks() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """The hooks on saved tensors that are in force: ``_top_saved_tensors_default_hooks``, since torch 2.0.

    Torch tells nobody, and ``torch.func`` refuses to run where there are any. Without it they cannot give way.
    """
    found: tuple[Callable[..., Any], Callable[..., Any]] | None
    found = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return found


def is_in_backward() -> bool:
    """Whether autograd is walking a graph on this thread: ``_current_graph_task_id``, since torch 2.0."""
    return torch._C._current_graph_task_id() != -1


def sequence_number(node: Any) -> int:
    """The place of a node among all that were made: ``_sequence_nr``, since torch 1.11.

    It tells the nodes that one call of a block made. Without it no memory budget can be planned.
    """
    return int(node._sequence_nr())


def has_saved_result(node: Any) -> bool:
    """Whether an operator that saves its own result has done so: ``_raw_saved_result``, ``_saved_result``, torch 1.9.

    What it has saved must not be unpacked to find out: under checkpointing that computes a whole block again. So the
    second is asked only where the first shows neither data nor a hook, as is also the case, with an error, once the
    graph was freed. True where a torch has no such names: nothing is then taken for a result that is being saved.
    """
    try:
        saved = node._raw_saved_result
        return saved.data is not None or saved.unpack_hook is not None or node._saved_result is not None
    except (AttributeError, RuntimeError):
        return True


# -- the profiler of allocations -------------------------------------------------------------------------------------


def stop_legacy_profiler() -> list[list[Any]]:
    """Ends autograd's first profiler, and returns its events by thread: ``_disable_profiler_legacy``, torch 1.9.

    The public way out of it sorts events, and drops in which order allocations were made. Without it no memory budget
    can be planned on a CPU.
    """
    return torch._C._autograd._disable_profiler_legacy()


def before_profilers(tell: Callable[[], Any]) -> Callable[[], None]:
    """Has ``tell`` called before any profiler starts, until the function that is returned is called.

    All of them begin with ``torch.autograd.profiler._enable_profiler``, since torch 1.9. One profiler at a time is all
    there can be: ours has to end before another one starts, or that one raises.
    """
    profilers: Any = torch.autograd.profiler
    enable = profilers._enable_profiler

    def enable_profiler(*args: Any, **kwargs: Any) -> Any:
        tell()
        return enable(*args, **kwargs)

    profilers._enable_profiler = enable_profiler

    def restore() -> None:
        profilers._enable_profiler = enable

    return restore


# -- compilation -----------------------------------------------------------------------------------------------------


def compiled_call(module: nn.Module) -> Callable[..., Any] | None:
    """What ``module.compile()`` made of its calls: ``_compiled_call_impl``, since torch 2.0. No public way tells."""
    return module._compiled_call_impl


def set_compiled_call(module: nn.Module, call: Callable[..., Any] | None) -> None:
    """What :func:`compiled_call` reads; None: calls run eagerly. ``module.compile()`` does nothing for torch's own."""
    if call is None:
        vars(module).pop("_compiled_call_impl", None)
    else:
        module._compiled_call_impl = call


def eager_call(module: nn.Module) -> Callable[..., Any]:
    """A module's call, its hooks included, past whatever was compiled: ``_call_impl``, since torch 1.6."""
    return module._call_impl


def was_compiled_by_lightning(module: nn.Module) -> bool:
    """Whether Lightning unwrapped it from ``torch.compile()``: its ``_compiler_ctx``, since Lightning 2.0.

    The Trainer then has the original, whose methods Lightning has replaced by compiled ones. It stands here, as core
    must know. Without it such a module is taken for one that runs eagerly.
    """
    return getattr(module, "_compiler_ctx", None) is not None


def compile_with_inductor(graph: GraphModule, inputs: list[Tensor], options: dict[str, Any]) -> Any:
    """What ``torch.compile()`` does with a captured graph: ``torch._inductor.compile_fx``, since torch 2.0.

    For a graph that is edited between the two. Without it blocks fail to compile, and run eagerly.
    """
    from torch._inductor.compile_fx import compile_fx  # the whole code generator

    return compile_fx(graph, inputs, config_patches=options)
