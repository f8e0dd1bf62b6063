"""Helpers for `torch.compile`: tells which modules are compiled, compiles a call in place, runs modules eagerly."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import FunctionType
from typing import Any

import torch
import torch.compiler.config
from torch import Tensor, nn
from torch.fx import GraphModule

from lightning_accel.core.clocks import Stopwatch
from lightning_accel.core.patch import MethodPatch, SwitchPatch, applied
from lightning_accel.core.torch_private import modules
from lightning_accel.core.torch_private.compilation import (
    compile_with_inductor,
    compiled_alone,
    compiled_call,
    set_compiled_call,
)

_NUMBERS = itertools.count()
_FORWARD_PATCH = "lightning_accel_compiled_forward"

RUNS_EAGERLY = "runs_eagerly"
"""Set on a callable that replaces a compiled call but compiles nothing, such as one that names modules in traces."""

# One for all: by it a patch knows those of the same switch.
_recompile_limit = functools.partial(getattr, torch.compiler.config, "recompile_limit")


def compiled_anew(times: int) -> AbstractContextManager[None]:
    """Lets the code of a function be compiled so many times at least. Such contexts may end in any order.

    Torch's own ``config.patch`` restores what it has found even if that came from a context that is over by now; since
    torch 2.13, where each thread has its own settings, it raises on another thread.
    """
    write = functools.partial(setattr, torch.compiler.config, "recompile_limit")
    return applied(SwitchPatch(_recompile_limit, write, max(_recompile_limit(), times)))


def is_compiled(module: nn.Module) -> bool:
    """Returns whether calls of this module itself are compiled: ``module.compile()`` or ``torch.compile(module)``."""
    own, call = vars(module), compiled_call(module)
    # Lightning, if it is given torch.compile(module), puts compiled methods on the original.
    by_lightning = any(hasattr(own.get(name), "get_compiler_config") for name in ("forward", "training_step"))
    is_called_compiled = call is not None and not getattr(call, RUNS_EAGERLY, False)
    return by_lightning or is_called_compiled or _FORWARD_PATCH in own or type(module).__name__ == "OptimizedModule"


def is_inside_compiled(model: nn.Module, site: str) -> bool:
    """Returns whether the module at ``site``, or one that contains it, is compiled."""
    parts = site.split(".") if site else []
    return any(is_compiled(model.get_submodule(".".join(parts[:depth]))) for depth in range(len(parts) + 1))


class CompiledKind:
    """Modules that compile to the same code and share it, so that each graph is compiled once for all of them.

    Args:
        told: Called with this object after each compilation, in the middle of a module's call.

    Attributes:
        prepare: Edits a captured graph before it is compiled.
        graphs: How many graphs were compiled. A call that needs a new graph adds one.
        seconds: The time of these compilations, without backward passes, which are compiled at first use.
        call: The compiled call, which takes the module as first argument. None before :func:`compile_call`.
    """

    def __init__(self, told: Callable[[CompiledKind], None] = lambda kind: None) -> None:
        self.prepare: Callable[[GraphModule], None] = lambda graph: None
        self.graphs = 0
        self.seconds = 0.0
        self.call: Callable[..., Any] | None = None
        self._told = told

    def compiled(self, graph: GraphModule, inputs: list[Tensor], options: dict[str, Any]) -> Any:
        """Returns the compiled graph. Counts and times the compilation."""
        self.prepare(graph)
        stopwatch = Stopwatch()
        try:
            return compile_with_inductor(graph, inputs, options)
        finally:
            self.graphs += 1
            self.seconds += stopwatch.seconds()
            self._told(self)

    def forget(self) -> None:
        """Releases the compiled call and the model: torch keeps every backend alive until the process ends."""
        self.call = None
        self.prepare = lambda graph: None
        self._told = lambda kind: None


def compile_call(
    module: nn.Module,
    options: dict[str, Any],
    prepare: Callable[[GraphModule], None] = lambda graph: None,
    kind: CompiledKind | None = None,
) -> None:
    """Compiles a module's call in place, as ``module.compile()`` does for classes of the user.

    Of a module that FSDP shards, only the forward is compiled, inside the hooks that gather parameters: the compiler
    would skip those hooks. ``options`` are TorchInductor's. ``prepare`` edits a captured graph before its compilation.
    Modules of the same ``kind`` share compiled code and must have the same options.

    For classes of ``torch.nn`` (``nn.TransformerEncoderLayer``, ``nn.Sequential``) ``module.compile()`` silently
    compiles nothing: the compiler starts at no frame of torch's own code (torch 2.13). Here it starts at a frame of
    this package.
    """
    kind = kind or CompiledKind()
    kind.prepare = prepare

    def backend(graph: GraphModule, inputs: list[Tensor]) -> Any:
        return kind.compiled(graph, inputs, options)

    if is_gathered_by_hooks(module):

        def compiled_forward(original: Callable[..., Any]) -> Callable[..., Any]:
            def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
                return original(self, *args, **kwargs)

            compiled = compiled_alone(with_own_code(forward), backend=backend)
            return lambda self, *args, **kwargs: compiled(self, *args, **kwargs)  # a plain function can be bound

        patch = vars(module)[_FORWARD_PATCH] = MethodPatch("", "compiled", module, "forward", compiled_forward)
        patch.apply()
        return

    if kind.call is None:

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return modules.eager_call(module)(*args, **kwargs)

        kind.call = compiled_alone(with_own_code(call), backend=backend)
    set_compiled_call(module, functools.partial(kind.call, module))


def with_own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function with a code object of its own.

    Torch keeps compiled versions with the code object: a limited number, searched one by one at every call. If all
    blocks of all models shared one, torch would silently run them eagerly past the limit. Modules of one kind may share
    it, as one version serves them all. The versions stay until ``torch._dynamo.reset()``, as for every function given
    to torch.compile.
    """
    assert isinstance(function, FunctionType)
    # Torch records by function name which sizes change between calls. Different blocks need different names.
    code = function.__code__.replace(co_name=f"{function.__name__}_{next(_NUMBERS)}")
    parts = function.__globals__, function.__name__, function.__defaults__, function.__closure__
    copy = FunctionType(code, *parts)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def undo_compile(module: nn.Module) -> None:
    """Makes the module's calls run eagerly again."""
    set_compiled_call(module, None)
    if (patch := vars(module).pop(_FORWARD_PATCH, None)) is not None:
        patch.undo()


def eager_call(module: nn.Module) -> Callable[..., Any]:
    """Returns a callable that runs the module without its compiled call."""
    # Inside the module's own call its parameters are gathered already. A nested call would release them.
    return module.forward if is_gathered_by_hooks(module) else modules.eager_call(module)


def is_gathered_by_hooks(module: nn.Module) -> bool:
    """Returns whether FSDP gathers the module's parameters in hooks around its forward."""
    # Not imported here: whoever sharded a module has imported it.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def eager_where_compiled(model: nn.Module) -> AbstractContextManager[Any]:
    """Runs compiled parts of ``model`` eagerly, for a step under a dispatch mode or a function mode.

    Compiled code called under a dispatch mode stays eager afterwards, and under a function mode is compiled again
    (torch 2.13). The stance ``force_eager`` prevents both.
    """
    has_compiled = any(is_compiled(module) for module in model.modules())
    return torch.compiler.set_stance("force_eager") if has_compiled else nullcontext()
