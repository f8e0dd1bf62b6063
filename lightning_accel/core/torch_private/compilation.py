"""Private names of compilers: TorchDynamo and TorchInductor."""

from __future__ import annotations

import functools
import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree

from lightning_accel.core.patch import temporarily

R = TypeVar("R")


def dynamo_is_loaded() -> bool:
    """Returns whether anything may have been compiled: ``torch._dynamo`` is imported by then, and by any optimizer."""
    return "torch._dynamo" in sys.modules


def graphs_captured() -> int:
    """Returns how many graphs ``torch.compile`` has captured: ``torch._dynamo.utils.counters``, since torch 2.0.

    Code that is captured at every step never finishes compiling. Without the name: an ``AttributeError``.
    """
    utils = sys.modules.get("torch._dynamo.utils")  # runs at every step
    return 0 if utils is None else int(utils.counters["stats"]["unique_graphs"])


def compiling_ms() -> float:
    """Returns the milliseconds spent in ``torch.compile``: ``torch._dynamo.utils.calculate_time_spent``, torch 2.5."""
    if not dynamo_is_loaded():
        return 0.0
    spent_s = importlib.import_module("torch._dynamo.utils").calculate_time_spent()
    return 1e3 * float(spent_s.get("entire_frame_compile", 0.0))


def dynamo_is_off() -> bool:
    """Returns whether ``set_stance("force_eager")`` or TORCHDYNAMO_DISABLE is in force: ``_stance``, torch 2.6.

    The stance can be set publicly, but not read. A capture would then run its code as written, unseen by modes.
    """
    eval_frame: Any = importlib.import_module("torch._dynamo.eval_frame")
    return bool(eval_frame._stance.stance == "force_eager" or eval_frame.config.disable)


def outside_of_ddp() -> AbstractContextManager[None]:
    """Makes Dynamo capture whole graphs inside DDP's forward pass: ``_active_ddp_module``, since torch 1.12.

    Dynamo would split graphs at DDP's buckets, even inside attention; the public setting holds for the whole process.
    Without the name graphs are split, and attention across a split is left alone.
    """
    name = "_active_ddp_module"
    read = functools.partial(getattr, DistributedDataParallel, name, None)
    if read() is None:  # runs at every call of captured attention
        return nullcontext()
    return temporarily(read, functools.partial(setattr, DistributedDataParallel, name), None)


def compiled_alone(function: Callable[..., R], **settings: Any) -> Callable[..., R]:
    """Calls ``torch.compile`` without what its first call changes in the process: ``TorchPatcher.patch``, torch 2.0.

    That switches off the checks of ``torch.distributions``, so that a run which would end with an error trains on with
    NaN; and it puts wrappers around methods of optimizers. The user's own ``torch.compile`` still does so. Without the
    name, so does this one.
    """
    patcher = getattr(importlib.import_module("torch._dynamo.eval_frame"), "TorchPatcher", None)
    if not hasattr(patcher, "patch"):
        return torch.compile(function, **settings)
    read, write = functools.partial(vars(patcher).get, "patch"), functools.partial(setattr, patcher, "patch")
    with temporarily(read, write, lambda: None):
        return torch.compile(function, **settings)


@contextmanager
def lean_captures() -> Iterator[None]:
    """Keeps Dynamo from calling the garbage collector after each capture, and from putting a profiler's marks into it.

    ``run_gc_after_compile`` and ``record_runtime_overhead``, both seen in torch 2.11. The marks are calls
    of Python code that run with each graph. Without a name that is done. Nor does Dynamo say what keeps it from
    capturing the user's code, unless its loggers were set up (``TORCH_LOGS``): nobody asked it to.
    """
    logger = logging.getLogger("torch._dynamo")
    config: Any = importlib.import_module("torch._dynamo.config")
    names = [name for name in ("run_gc_after_compile", "record_runtime_overhead") if hasattr(config, name)]
    with ExitStack() as stack:
        for name in names:
            read, write = functools.partial(getattr, config, name), functools.partial(setattr, config, name)
            stack.enter_context(temporarily(read, write, False))
        if logger.level == logging.NOTSET:
            stack.enter_context(temporarily(lambda: logging.NOTSET, logger.setLevel, logging.ERROR))
        yield


def draws_by_numpy(graph: GraphModule) -> bool:
    """Returns whether a captured graph draws in NumPy's place, from torch's random stream, as since torch 2.1.

    Dynamo wraps torch's version of the function in an object that has it as ``f``. Without that name: False, and both
    random streams differ.
    """
    functions = (getattr(node.target, "f", None) for node in graph.graph.nodes)
    return any(getattr(function, "__module__", "").endswith("numpy.random") for function in functions)


def drop_weak_references(graph: GraphModule) -> None:
    """Drops what a captured graph has to the tensors it was captured with: torch swaps none that has a weak reference.

    They are in a dictionary, of what makes fake tensors, which lives as long as these; as since torch 2.5. Without its
    name nothing is done, and ``torch.utils.swap_tensors`` raises until the graph is gone.
    """
    modes = (getattr(node.meta.get("example_value"), "fake_mode", None) for node in graph.graph.nodes)
    mode: Any = next(filter(None, modes), None)
    with suppress(AttributeError):
        mode.fake_tensor_converter.meta_converter.describer.lookup_tensor.clear()


def compiled_call(module: nn.Module) -> Callable[..., Any] | None:
    """Returns the compiled call of ``module.compile()``: ``_compiled_call_impl``, torch 2.0. No public name tells."""
    return module._compiled_call_impl


def set_compiled_call(module: nn.Module, call: Callable[..., Any] | None) -> None:
    """Sets what :func:`compiled_call` reads; None for eager calls. ``module.compile()`` skips torch's own classes."""
    if call is None:
        vars(module).pop("_compiled_call_impl", None)
    else:
        module._compiled_call_impl = call


def compile_with_inductor(graph: GraphModule, inputs: list[Tensor], options: dict[str, Any]) -> Any:
    """Compiles a captured graph as ``torch.compile()`` does: ``torch._inductor.compile``, since torch 2.0.

    Needed because graphs are edited before compilation. Without it blocks fail to compile and run eagerly.
    """
    return torch._inductor.compile(graph, [*inputs], options)


def inductor_options(mode: str) -> dict[str, Any]:
    """Returns the options of a mode of ``torch.compile()``, by the function that its documentation names.

    ``torch._inductor.list_mode_options``, since torch 2.0: https://docs.pytorch.org/docs/stable/generated/torch.compile
    Without it nothing is compiled, and the run goes on.
    """
    return torch._inductor.list_mode_options(mode)


def compile_to_package(program: ExportedProgram, path: Path) -> None:
    """Compiles an exported program to a file that needs no Python: ``torch._inductor.aoti_compile_and_package``, 2.6.

    Documented: https://docs.pytorch.org/docs/stable/torch.compiler_aot_inductor.html. Weights become constants whose
    layout the compiler may change. Without the name: an ``AttributeError``.
    """
    torch._inductor.aoti_compile_and_package(program, package_path=str(path), inductor_configs={"freezing": True})


def load_package(path: Path) -> Callable[..., Any]:
    """Loads a file of :func:`compile_to_package`: ``torch._inductor.aoti_load_package``, since torch 2.6.

    Without the name: an ``AttributeError``.
    """
    loaded: Callable[..., Any] = torch._inductor.aoti_load_package(str(path))
    return loaded


def cpp_compilers() -> list[str]:
    """Returns the C++ compilers that TorchInductor tries, in order: ``torch._inductor.config.cpp.cxx``, torch 2.0.

    Torch's own search raises errors and imports the whole code generator. Without the name the list is empty, and
    nothing is compiled.
    """
    try:
        configured: Any = importlib.import_module("torch._inductor.config").cpp.cxx
    except (ImportError, AttributeError):
        return []
    return [name for name in (configured if isinstance(configured, list | tuple) else (configured,)) if name]


def register_constant(kind: type[Any]) -> None:
    """Makes Dynamo treat objects of a class as constants: ``torch.utils._pytree.register_constant``, since torch 2.7.

    Dynamo of torch 2.11 does not accept dict keys of a subclass of str. Without the name nothing is done, and models of
    transformers are captured with graph breaks.
    """
    register = getattr(_pytree, "register_constant", None)
    if register is not None:
        register(kind)
