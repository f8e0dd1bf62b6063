"""Every name of torch's own that the library uses, one function each; nothing else in it has a leading underscore.

A function says why it is needed, since which torch the name is known, and what is done where it is missing. What a new
torch has dropped then fails in one test of tests/core/test_torch_private.py, which says in plain words what broke.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import _C, Tensor, nn
from torch.autograd import Variable, forward_ad
from torch.fx import GraphModule
from torch.nn.modules import module as all_modules
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _python_dispatch, _pytree


def coo_parts(tensor: Tensor) -> list[Tensor]:
    """The indices and the values of a sparse COO tensor: the memory that it has.

    ``_indices`` and ``_values`` are as old as sparse tensors (torch 0.2), and the only way to the memory of one that is
    not coalesced: ``indices()`` and ``values()`` refuse it, and ``coalesce()`` makes other memory. Where they are
    missing, a batch with such a tensor fails with the AttributeError, and coalesced ones go on.
    """
    if tensor.is_coalesced():
        return [tensor.indices(), tensor.values()]
    return [tensor._indices(), tensor._values()]


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


def has_gradient_hooks(tensor: Tensor) -> bool:
    """Whether somebody has registered a hook on its gradient: ``_backward_hooks``, ``_post_accumulate_grad_hooks``.

    Tensors have methods to register such hooks, and none that lists them. Since torch 2.1. Without the second name,
    hooks of that kind are not seen, and FSDP2, which makes another parameter, loses them.
    """
    return bool(tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None))


handles_on_tensor: Callable[[Tensor], int] = getattr(Tensor, "_use_count", lambda tensor: 0)
"""How many hold a tensor from C++: ``_use_count``, since torch 2.1; nothing else shows what autograd or DLPack holds.

Where it is missing, 0 of every tensor, by which nobody can be told to hold one: then activations are never in place.
"""


def handles_on_storage(storage: torch.UntypedStorage) -> int:
    """How many tensors and others hold memory: ``_storage_Use_Count``, since torch 2.1, of ``_cdata``.

    Where it is missing, the AttributeError goes to the caller, who then leaves the memory alone.
    """
    return _C._storage_Use_Count(storage._cdata)


def saved_tensors_are_packed() -> bool:
    """Whether ``saved_tensors_hooks`` are in force (checkpointing, offloading), which torch does not say publicly.

    ``_top_saved_tensors_default_hooks`` with its argument since torch 2.7.
    """
    return _C._autograd._top_saved_tensors_default_hooks(True) is not None


def version_of(tensor: Tensor) -> int:
    """How often ``tensor`` was changed in place: ``_version``, since torch 0.4.

    Autograd compares it for what it saves, and so must whoever saves in its stead. Without it nothing is offloaded.
    """
    return tensor._version


def without_dispatch_modes() -> AbstractContextManager[Any]:
    """Has nobody who watches operations see those inside: ``_disable_current_modes``, since torch 2.0.

    Somebody may be counting FLOPs while a trial runs. Without it every trial fails, and says so.
    """
    return _python_dispatch._disable_current_modes()


def has_modes() -> bool:
    """Whether dispatch or function modes see every operation: lengths of two stacks, since torch 2.0.

    TorchDynamo captures nothing, or anew, under them. Without the names every captured attention runs as it was
    written, for the reason that the AttributeError gives.
    """
    return bool(_C._len_torch_dispatch_stack() or _C._len_torch_function_stack())


@contextmanager
def without_function_modes() -> Iterator[list[Any]]:
    """Takes the function modes away, yields them, outermost first, and puts them back.

    ``_pop_mode`` and ``_push_mode`` of ``torch.overrides``, since torch 2.0; a mode's own exit may do more than that.
    As for :func:`has_modes`.
    """
    overrides: Any = torch.overrides
    modes = [overrides._pop_mode() for _ in range(_C._len_torch_function_stack())][::-1]
    try:
        yield modes
    finally:
        for mode in modes:
            overrides._push_mode(mode)


def hooks_on_all_modules() -> list[Any]:
    """The forward hooks and pre-hooks on every module: ``_global_forward_hooks``, ``_global_forward_pre_hooks``.

    Since torch 1.8; torch can only add them. They are to see each part of an attention called, which no graph calls.
    Without the names captured attention runs as it was written.
    """
    return [*all_modules._global_forward_hooks.values(), *all_modules._global_forward_pre_hooks.values()]


def dynamo_is_off() -> bool:
    """Whether ``torch.compiler.set_stance("force_eager")`` or TORCHDYNAMO_DISABLE is in force: ``_stance``, torch 2.6.

    Set publicly, and asked nowhere. A capture then runs what it captured as it was written, out of sight of modes.
    """
    eval_frame: Any = importlib.import_module("torch._dynamo.eval_frame")
    return bool(eval_frame._stance.stance == "force_eager" or eval_frame.config.disable)


@contextmanager
def outside_of_ddp() -> Iterator[None]:
    """Has Dynamo capture whole graphs inside DDP's forward pass: ``_active_ddp_module``, since torch 1.12.

    By DDP's buckets it would cut them up, through attention too; the public setting is for the whole process. Without
    the name graphs are cut, and attention across a cut is left alone.
    """
    active = getattr(DistributedDataParallel, "_active_ddp_module", None)
    DistributedDataParallel._active_ddp_module = None
    try:
        yield
    finally:
        DistributedDataParallel._active_ddp_module = active


def register_constant(kind: type[Any]) -> None:
    """Has Dynamo take objects of a class for constants, as ``torch.utils._pytree.register_constant`` since torch 2.7.

    Dynamo of torch 2.11 takes no key of a dict that is a string by inheritance. Where it is missing, nothing is done:
    models of transformers are then captured with graph breaks.
    """
    register = getattr(torch.utils._pytree, "register_constant", None)
    if register is not None:
        register(kind)


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


def compiled_call(module: nn.Module) -> Callable[..., Any] | None:
    """What ``module.compile()`` made of its calls: ``_compiled_call_impl``, since torch 2.0. No public way tells."""
    return module._compiled_call_impl


def set_compiled_call(module: nn.Module, call: Callable[..., Any] | None) -> None:
    """What :func:`compiled_call` reads; None: calls run eagerly. ``module.compile()`` does nothing for torch's own."""
    if call is None:
        vars(module).pop("_compiled_call_impl", None)
    else:
        module._compiled_call_impl = call


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


def parameter_slots(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The dict behind ``register_parameter``: ``_parameters``, since torch 0.1, empty slots and ties among them.

    The public iterators leave both out. Without it, and the two below, no module can be copied for a trial, and every
    trial fails.
    """
    return module._parameters


def buffer_slots(module: nn.Module) -> dict[str, Tensor | None]:
    """The dict behind ``register_buffer``: ``_buffers``, since torch 0.1, as for parameters."""
    return module._buffers


def module_slots(module: nn.Module) -> dict[str, nn.Module | None]:
    """The dict behind ``add_module``: ``_modules``, since torch 0.1, as for parameters."""
    return module._modules


class DispatchMode(_python_dispatch.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation under it: ``torch.utils._python_dispatch.TorchDispatchMode``, since torch 1.13.

    There is no public base for that. Without it the library cannot be imported.
    """


def is_fake(kind: type[Tensor]) -> bool:
    """Whether tensors of a class have no numbers: ``torch._subclasses.fake_tensor.FakeTensor``, since torch 2.0.

    DTensor asks such for the shapes of what it is about to compute: that is no work. Without it: False, and a mode that
    counts operations may count those too.
    """
    fake: Any = importlib.import_module("torch._subclasses.fake_tensor")
    return issubclass(kind, getattr(fake, "FakeTensor", ()))


def dynamo_is_loaded() -> bool:
    """Whether anything may have been compiled: ``torch._dynamo`` is imported with it, in a second, and only then."""
    return "torch._dynamo" in sys.modules


def convolution_method() -> str:
    """The method that a convolution's forward calls with its weight: ``_conv_forward``, since torch 1.8.

    Patched, it computes on its weight in another layout, while the parameter keeps the one that DDP's buckets have.
    Without the name an AttributeError takes all edits back, and the step runs as the user wrote it.
    """
    return "_conv_forward"


def cpp_compilers() -> list[str]:
    """The C++ compilers that TorchInductor looks for, in its order: ``torch._inductor.config.cpp.cxx``, torch 2.0.

    Its own look-up raises, and imports the whole code generator. Without the name: none, and nothing is compiled.
    """
    try:
        configured: Any = importlib.import_module("torch._inductor.config").cpp.cxx
    except (ImportError, AttributeError):
        return []
    return [name for name in (configured if isinstance(configured, list | tuple) else (configured,)) if name]


def tpu_library() -> Any:
    """What torch_xla knows of TPUs, ``torch_xla._internal.tpu``, which Lightning asks too; there is no public way.

    Without it (or without torch_xla): an ImportError, and the machine is taken for one without TPUs.
    """
    return importlib.import_module("torch_xla._internal.tpu")


def is_transformed() -> bool:
    """Whether this is inside a transform of torch.func, or forward-mode differentiation, which count for themselves.

    ``peek_interpreter_stack`` and ``_current_level``, both since torch 2.0; torch has no public question for either.
    Without them the AttributeError goes to the caller, who then leaves things as they are.
    """
    return _C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0
