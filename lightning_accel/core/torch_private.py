"""Every private name of torch that the library uses, one function each, and the few of others than Lightning.

A function says why it is needed, since which torch the name is known, and what is done where it is missing. What a new
torch has dropped then fails in one test of tests/core/test_torch_private.py, which says in plain words what broke.
"""

from __future__ import annotations

import functools
import importlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import _C, Tensor, nn
from torch.autograd import Variable, forward_ad
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torch.nn.modules import module as all_modules
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.hooks import RemovableHandle

# -- memory of tensors -----------------------------------------------------------------------------------------------


handles_on_tensor: Callable[[Tensor], int] = getattr(Tensor, "_use_count", lambda tensor: 0)
"""How many hold a tensor from C++: ``_use_count``, since torch 2.1; nothing else shows what autograd or DLPack holds.

Where it is missing, 0 of every tensor, by which nobody can be told to hold one: then activations are never in place.
"""


def handles_on_storage(storage: torch.UntypedStorage) -> int:
    """How many tensors and others hold memory: ``_storage_Use_Count``, since torch 2.1, of ``_cdata``.

    Where it is missing, the AttributeError goes to the caller, who then leaves the memory alone.
    """
    return _C._storage_Use_Count(storage._cdata)


version_of: Callable[[Tensor], int] = attrgetter("_version")
"""How often a tensor was changed in place: ``_version``, since torch 0.4.

Autograd compares it for what it saves, and so must whoever saves in its stead. Without it nothing is offloaded.
"""


def set_version(tensor: Tensor, version: int) -> None:
    """Sets what :func:`version_of` counts: ``_unsafe_set_version_counter``, a tuple of tensors since torch 2.6.

    Nothing else tells whether two tensors share a counter but to move one and put it back.
    """
    _C._autograd._unsafe_set_version_counter((tensor,), (version,))


def base_of(tensor: Tensor) -> Tensor | None:
    """What ``tensor`` is a view of: ``_base``, since torch 0.4. It tells the views of parameters that FSDP gathers."""
    return tensor._base


def wrapper_tensor(kind: type[Tensor], like: Tensor, device: torch.device) -> Tensor:
    """A tensor of a subclass that has a shape, strides, a dtype and a device, and no memory.

    ``_make_wrapper_subclass``, since torch 1.10, of a class with ``__torch_dispatch__``; there is no public way.
    Without it a step with a large head raises, and under Lightning is repeated without edits.
    """
    return Tensor._make_wrapper_subclass(kind, like.shape, like.stride(), dtype=like.dtype, device=device)


# -- autograd --------------------------------------------------------------------------------------------------------


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


# -- modules ---------------------------------------------------------------------------------------------------------


def eager_call(module: nn.Module | type[nn.Module]) -> Callable[..., Any]:
    """A module's call, its hooks included, past whatever was compiled: ``_call_impl``, since torch 1.6.

    Of the class: the function whose frame lies between a caller and a forward pass.
    """
    return module._call_impl


def _attribute_of_hooks(register: Callable[..., RemovableHandle]) -> str:
    """The attribute in which a module keeps the hooks that ``register`` takes: the handle refers to them."""
    module = nn.Module()
    hooks = register(module, lambda *args: None).hooks_dict_ref()
    return next(name for name, value in vars(module).items() if value is hooks)


_HOOKS = (
    _attribute_of_hooks(nn.Module.register_forward_hook),
    _attribute_of_hooks(nn.Module.register_forward_pre_hook),
    _attribute_of_hooks(nn.Module.register_full_backward_hook),
    _attribute_of_hooks(nn.Module.register_full_backward_pre_hook),
)


def hooks_of(module: nn.Module) -> tuple[dict[int, Any], ...]:
    """A module's own forward hooks, forward pre-hooks, backward hooks and backward pre-hooks, each by its handle.

    Whoever hooks a module sees its inputs and outputs. Torch can only add hooks, not list them; where it keeps them is
    found by adding one. Where one kind is missing (a module may answer for its own attributes), as if it were empty.
    """
    return tuple(vars(module).get(name) or {} for name in _HOOKS)


def _attribute_of_parts(part: Any) -> str:
    """The attribute in which a module keeps parts of this kind: where one is found that was set."""
    module = nn.Module()
    module.part = part
    return next(name for name, value in vars(module).items() if isinstance(value, dict) and "part" in value)


_PARTS = tuple(map(_attribute_of_parts, (nn.Module(), nn.Parameter(torch.empty(0)), nn.Buffer(torch.empty(0)))))


def parts_of(module: nn.Module) -> list[Any]:
    """A module's own modules, parameters and buffers, empty slots among them, in a microsecond.

    The public ways, which are generators over names without repetition, take ten times as long. Where they are kept is
    found by setting one of each; where one kind is missing, as if there were none.
    """
    return [part for name in _PARTS for part in (vars(module).get(name) or {}).values()]


def hooks_on_all_modules() -> list[Any]:
    """The forward hooks and pre-hooks on every module, which torch can only add, in the dicts that its handles show.

    They are to see each part of an attention called, which no graph calls.
    """
    return [hook for hooks in _HOOKS_ON_ALL for hook in hooks.values()]


def _hooks_kept_by(handle: RemovableHandle) -> dict[int, Any]:
    handle.remove()
    hooks: dict[int, Any] | None = handle.hooks_dict_ref()
    assert hooks is not None  # torch holds it
    return hooks


_HOOKS_ON_ALL = tuple(
    _hooks_kept_by(register(lambda *args: None))
    for register in (all_modules.register_module_forward_hook, all_modules.register_module_forward_pre_hook)
)


def buffer_slots(module: nn.Module) -> dict[str, Tensor | None]:
    """The dict behind ``register_buffer``: ``_buffers``, since torch 0.1, empty slots and ties among them.

    The public iterators leave both out. Without it every trial fails, as no module can be put back after it.
    """
    return module._buffers


def reset_method(module: nn.Module) -> Callable[[], Any] | None:
    """What initialises a module's own parameters; None where it has no such method.

    Torch's layers have ``reset_parameters()``, except nn.MultiheadAttention and nn.Transformer, which underline it.
    Without the name: None, and such a layer on the meta device is refused as one without initial values.
    """
    method = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    return method if callable(method) else None


def convolution_method() -> str:
    """The method that a convolution's forward calls with its weight: ``_conv_forward``, since torch 1.8.

    Patched, it computes on its weight in another layout, while the parameter keeps the one that DDP's buckets have.
    Without the name an AttributeError takes all edits back, and the step runs as the user wrote it.
    """
    return "_conv_forward"


# -- modes that see every operation ----------------------------------------------------------------------------------


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation under it: ``torch.utils._python_dispatch.TorchDispatchMode``, since torch 1.13.

    There is no public base for that. Without it the library cannot be imported.
    """


def has_modes() -> bool:
    """Whether dispatch or function modes see every operation: ``_len_torch_dispatch_stack``, since torch 2.0.

    TorchDynamo captures nothing, or anew, under them. Without the name every captured attention runs as it was
    written, for the reason that the AttributeError gives.
    """
    return bool(_C._len_torch_dispatch_stack()) or torch.overrides.has_torch_function(_NOTHING)


_NOTHING = (None,)  # what only modes can have a torch function for


def without_dispatch_modes() -> AbstractContextManager[Any]:
    """Has nobody who watches operations see those inside: ``_disable_current_modes``, since torch 2.0.

    Somebody may be counting FLOPs while a trial runs. Without it every trial fails, and says so.
    """
    return _disable_current_modes()


@contextmanager
def without_function_modes() -> Iterator[list[Any]]:
    """Takes the function modes away, yields them, outermost first, and puts them back.

    ``_pop_mode`` of ``torch.overrides``, since torch 2.0; a mode's own exit may do more than that, and its own entry
    more than that of the base class. As for :func:`has_modes`.
    """
    overrides: Any = torch.overrides
    modes: list[Any] = []
    while overrides.has_torch_function(_NOTHING):
        modes.insert(0, overrides._pop_mode())
    try:
        yield modes
    finally:
        for mode in modes:
            overrides.TorchFunctionMode.__enter__(mode)


# -- compilation -----------------------------------------------------------------------------------------------------


def dynamo_is_loaded() -> bool:
    """Whether anything may have been compiled: ``torch._dynamo`` is imported with it, in a second, and only then."""
    return "torch._dynamo" in sys.modules


def graphs_captured() -> int:
    """How many graphs ``torch.compile`` has captured: ``torch._dynamo.utils.counters``, since torch 2.0.

    What is captured at every step is never done compiling. Without it, none are said to be.
    """
    utils = sys.modules.get("torch._dynamo.utils")  # every step asks
    return 0 if utils is None else int(utils.counters["stats"]["unique_graphs"])


def compiling_ms() -> float:
    """What ``torch.compile`` has taken so far, milliseconds: ``torch._dynamo.utils.calculate_time_spent``, torch 2.5.

    Without it, nothing is said to be.
    """
    if not dynamo_is_loaded():
        return 0.0
    spent_s = importlib.import_module("torch._dynamo.utils").calculate_time_spent()
    return 1e3 * float(spent_s.get("entire_frame_compile", 0.0))


def dynamo_is_off() -> bool:
    """Whether ``torch.compiler.set_stance("force_eager")`` or TORCHDYNAMO_DISABLE is in force: ``_stance``, torch 2.6.

    Set publicly, and asked nowhere. A capture then runs what it captured as it was written, out of sight of modes.
    """
    eval_frame: Any = _eval_frame()
    return bool(eval_frame._stance.stance == "force_eager" or eval_frame.config.disable)


@functools.cache
def _eval_frame() -> ModuleType:
    return importlib.import_module("torch._dynamo.eval_frame")


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


def compiled_call(module: nn.Module) -> Callable[..., Any] | None:
    """What ``module.compile()`` made of its calls: ``_compiled_call_impl``, since torch 2.0. No public way tells."""
    return module._compiled_call_impl


def set_compiled_call(module: nn.Module, call: Callable[..., Any] | None) -> None:
    """What :func:`compiled_call` reads; None: calls run eagerly. ``module.compile()`` does nothing for torch's own."""
    if call is None:
        vars(module).pop("_compiled_call_impl", None)
    else:
        module._compiled_call_impl = call


def compile_with_inductor(graph: GraphModule, inputs: list[Tensor], options: dict[str, Any]) -> Any:
    """What ``torch.compile()`` does with a captured graph: ``torch._inductor.compile``, since torch 2.0.

    For a graph that is edited between the two. Without it blocks fail to compile, and run eagerly.
    """
    return torch._inductor.compile(graph, [*inputs], options)


def inductor_options(mode: str) -> dict[str, Any]:
    """The options that a mode of ``torch.compile()`` stands for, by the function that its documentation names.

    ``torch._inductor.list_mode_options``, since torch 2.0: https://docs.pytorch.org/docs/stable/generated/torch.compile
    Without it nothing is compiled, and the run goes on.
    """
    return torch._inductor.list_mode_options(mode)


def compile_to_package(program: ExportedProgram, path: Path) -> None:
    """Compiles an exported program to a file that needs no Python: ``torch._inductor.aoti_compile_and_package``, 2.6.

    Documented: https://docs.pytorch.org/docs/stable/torch.compiler_aot_inductor.html. Weights are constants that it
    may lay out anew. Without the name: an ``AttributeError``.
    """
    torch._inductor.aoti_compile_and_package(program, package_path=str(path), inductor_configs={"freezing": True})


def load_package(path: Path) -> Callable[..., Any]:
    """What :func:`compile_to_package` has written: ``torch._inductor.aoti_load_package``, since torch 2.6.

    Without the name: an ``AttributeError``.
    """
    loaded: Callable[..., Any] = torch._inductor.aoti_load_package(str(path))
    return loaded


def cpp_compilers() -> list[str]:
    """The C++ compilers that TorchInductor looks for, in its order: ``torch._inductor.config.cpp.cxx``, torch 2.0.

    Its own look-up raises, and imports the whole code generator. Without the name: none, and nothing is compiled.
    """
    try:
        configured: Any = importlib.import_module("torch._inductor.config").cpp.cxx
    except (ImportError, AttributeError):
        return []
    return [name for name in (configured if isinstance(configured, list | tuple) else (configured,)) if name]


def register_constant(kind: type[Any]) -> None:
    """Has Dynamo take objects of a class for constants, as ``torch.utils._pytree.register_constant`` since torch 2.7.

    Dynamo of torch 2.11 takes no key of a dict that is a string by inheritance. Where it is missing, nothing is done:
    models of transformers are then captured with graph breaks.
    """
    register = getattr(_pytree, "register_constant", None)
    if register is not None:
        register(kind)


# -- training --------------------------------------------------------------------------------------------------------


def exposed_communication(wrapped: DistributedDataParallel) -> float:
    """Which share of backward passes nothing but communication went on in: ``_get_ddp_logging_data``, since torch 1.8.

    DistributedDataParallel times its first ten steps, and each hundredth. Without the name nothing is told apart.
    """
    found = wrapped._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    names = ("avg_backward_comm_time", "avg_backward_compute_comm_overlap_time", "avg_backward_compute_time")
    communicating, overlapping, computing = (int(found.get(name, 0)) for name in names)
    exposed = max(0, communicating - overlapping)
    return exposed / (computing + exposed) if computing else 0.0


def check_all_reduced(wrapped: DistributedDataParallel) -> None:
    """Raises a ``RuntimeError`` after a backward pass in which parameters that DDP waits for got no gradient.

    Publicly DDP says so in the next step, when the optimizer has stepped with what was not averaged. Since torch 2.1.
    Without the name: it is left to the next step.
    """
    if (check := getattr(wrapped, "_check_reducer_finalized", None)) is not None:
        check()


def optimizer_states(scaler: torch.amp.GradScaler) -> dict[int, dict[str, Any]]:
    """What a gradient scaler knows of each optimizer under way, by its id: ``_per_optimizer_states``, torch 1.6.

    There is found whether gradients overflowed, and what was unscaled and waits for its step has to be kept there over
    an update. Without it an AttributeError ends float16 training: wrong scales would be silent.
    """
    states: dict[int, dict[str, Any]] = scaler._per_optimizer_states
    return states


def map_parts(function: Callable[[int, Any], Any], data: Any, structure: Any) -> Any:
    """``data`` with ``function(number, part)`` in place of each part that stands where ``structure`` has a leaf.

    Lightning flattens nested loaders with this module, and their order is that of its leaves. Since torch 1.8.
    Without the name: an ``ImportError``; it would have got a public name.
    """
    _, spec = _pytree.tree_flatten(structure)
    parts = [function(number, part) for number, part in enumerate(spec.flatten_up_to(data))]
    return _pytree.tree_unflatten(parts, spec)


def hold_device(ms: float) -> None:
    """Has the current CUDA stream do nothing for so many milliseconds, or up to some times that: ``_sleep``, torch 0.4.

    It counts cycles of a clock that goes at 2 GHz at most; the longest is half a second, as displays are reset after
    two. Without the name no step is held back, and no idle time is found: it is in the other parts.
    """
    if (sleep := getattr(torch.cuda, "_sleep", None)) is not None:
        sleep(int(2e6 * min(ms, 500.0)))


@contextmanager
def told_of_loading(told: Callable[[int], object]) -> Iterator[None]:
    """Tells how many nanoseconds a DataLoader without workers takes for the samples of a batch, which it then collates.

    Nothing public comes between the two: ``torch.utils.data._utils.fetch``, since torch 1.2. Without it, nothing is
    told: all of loading is then taken to grow with the batch. Other threads' loaders are not told of.
    """
    fetchers = getattr(getattr(torch.utils.data, "_utils", None), "fetch", None)
    found = {} if fetchers is None else vars(fetchers)
    kinds: list[Any] = [kind for kind in found.values() if isinstance(kind, type)]
    edited = [(kind, kind.__dict__["fetch"]) for kind in kinds if "fetch" in vars(kind)]
    thread = threading.get_ident()

    def telling(original: Callable[..., Any]) -> Callable[..., Any]:
        def fetch(self: Any, index: Any) -> Any:
            if threading.get_ident() != thread:
                return original(self, index)
            collate, began = self.collate_fn, time.perf_counter_ns()

            def collate_fn(samples: Any) -> Any:
                told(time.perf_counter_ns() - began)
                return collate(samples)

            self.collate_fn = collate_fn
            try:
                return original(self, index)
            finally:
                self.collate_fn = collate

        return fetch

    for kind, original in edited:
        kind.fetch = telling(original)
    try:
        yield
    finally:
        for kind, original in edited:
            kind.fetch = original


# -- profilers -------------------------------------------------------------------------------------------------------


def stop_legacy_profiler() -> list[list[Any]]:
    """Ends autograd's first profiler, and returns its events by thread: ``_disable_profiler_legacy``, torch 1.9.

    The public way out of it sorts events, and drops in which order allocations were made. Without it no memory budget
    can be planned on a CPU.
    """
    return _C._autograd._disable_profiler_legacy()


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


def record_memory_history(*, is_on: bool) -> None:
    """Has CUDA's allocator keep what it does, with the lines that asked: ``_record_memory_history``, since torch 2.1.

    Documented: https://docs.pytorch.org/docs/stable/torch_cuda_memory.html
    Without the name: an AttributeError, by which no step is traced on such a device, and the run goes on.
    """
    if is_on:
        torch.cuda.memory._record_memory_history(max_entries=100_000)  # a few hundred MiB at most
    else:
        torch.cuda.memory._record_memory_history(enabled=None)


def memory_snapshot() -> dict[str, Any]:
    """What CUDA's allocator holds and has kept, as https://pytorch.org/memory_viz reads it: ``_snapshot``, torch 2.1.

    Documented: https://docs.pytorch.org/docs/stable/torch_cuda_memory.html. As for :func:`record_memory_history`.
    """
    snapshot: dict[str, Any] = torch.cuda.memory._snapshot()
    return snapshot


# -- other libraries -------------------------------------------------------------------------------------------------


def init_weights_method(module: nn.Module) -> Callable[[nn.Module], Any] | None:
    """What initialises the modules within a model: the convention of transformers, whose models write it themselves.

    Without the name: None, and only :func:`reset_method` counts.
    """
    method = getattr(module, "_init_weights", None)
    return method if callable(method) else None


def tpu_library() -> Any:
    """What torch_xla knows of TPUs, ``torch_xla._internal.tpu``, which Lightning asks too; there is no public way.

    Without it (or without torch_xla): an ImportError, and the machine is taken for one without TPUs.
    """
    return importlib.import_module("torch_xla._internal.tpu")
