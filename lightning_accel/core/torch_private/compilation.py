"""Private names of what compiles: TorchDynamo and TorchInductor."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree


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
