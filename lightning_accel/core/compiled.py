"""What `torch.compile` and the rest of the package must know of each other."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from lightning_accel.core.clocks import Stopwatch
from lightning_accel.core.patch import MethodPatch
from lightning_accel.core.torch_private import modules
from lightning_accel.core.torch_private.compilation import compile_with_inductor, compiled_call, set_compiled_call

_NUMBERS = itertools.count()
_FORWARD_PATCH = "lightning_accel_compiled_forward"

RUNS_EAGERLY = "runs_eagerly"
"""Set on what stands where a compiled call would, and compiles nothing: what names a module in a trace."""


def is_compiled(module: nn.Module) -> bool:
    """Whether calls of this very module run compiled code, by ``module.compile()`` or ``torch.compile(module)``."""
    return (
        _was_compiled_by_lightning(module)
        or _FORWARD_PATCH in vars(module)
        or _has_compiled_call(module)
        or type(module).__name__ == "OptimizedModule"
    )


def _has_compiled_call(module: nn.Module) -> bool:
    call = compiled_call(module)
    return call is not None and not getattr(call, RUNS_EAGERLY, False)


def _was_compiled_by_lightning(module: nn.Module) -> bool:
    """Whether Lightning got it as ``torch.compile(module)``: it has then put compiled methods on the original."""
    return any(hasattr(vars(module).get(name), "get_compiler_config") for name in ("forward", "training_step"))


def is_inside_compiled(model: nn.Module, site: str) -> bool:
    """Whether the module at ``site``, or one around it, is compiled."""
    parts = site.split(".") if site else []
    return any(is_compiled(model.get_submodule(".".join(parts[:depth]))) for depth in range(len(parts) + 1))


class CompiledKind:
    """Modules that are alike as far as a compiler is concerned, and share what it makes: it is asked once for all.

    Args:
        told: Called with this whenever a graph was compiled, in the midst of a call.

    Attributes:
        prepare: Edits a captured graph before the compiler gets it.
        graphs: How many graphs were compiled; a call anew with what the compiler has not seen adds to them.
        seconds: What that has taken, backward passes, which are compiled when they are first needed, left out.
        call: The compiled call, which takes a module first; None before there is any.
    """

    def __init__(self, told: Callable[[CompiledKind], None] = lambda kind: None) -> None:
        self.prepare: Callable[[GraphModule], None] = lambda graph: None
        self.graphs = 0
        self.seconds = 0.0
        self.call: Callable[..., Any] | None = None
        self._told = told

    def compiled(self, graph: GraphModule, inputs: list[Tensor], options: dict[str, Any]) -> Any:
        """What the compiler makes of a graph; counted and timed."""
        self.prepare(graph)
        stopwatch = Stopwatch()
        try:
            return compile_with_inductor(graph, inputs, options)
        finally:
            self.graphs += 1
            self.seconds += stopwatch.seconds()
            self._told(self)

    def forget(self) -> None:
        """Lets go of what was compiled, and of the model: torch keeps every backend as long as the process lives."""
        self.call = None
        self.prepare = lambda graph: None
        self._told = lambda kind: None


def compile_call(
    module: nn.Module,
    options: dict[str, Any],
    prepare: Callable[[GraphModule], None] = lambda graph: None,
    kind: CompiledKind | None = None,
) -> None:
    """Compiles a module's call in place, as ``module.compile()`` does for modules of the user's own.

    Of one that FSDP shards only the forward is compiled, within the hooks that gather its parameters: the compiler
    leaves those hooks out. ``options`` are TorchInductor's; ``prepare`` edits a captured graph before it gets it. What
    is compiled is shared with other modules of that ``kind``, which have the same options.

    For those of ``torch.nn`` itself (``nn.TransformerEncoderLayer``, ``nn.Sequential``) that silently compiles
    nothing: the compiler starts at no frame whose code is torch's (torch 2.13). Here it starts at one of ours.
    """
    kind = kind or CompiledKind()
    kind.prepare = prepare

    def backend(graph: GraphModule, inputs: list[Tensor]) -> Any:
        return kind.compiled(graph, inputs, options)

    if is_gathered_by_hooks(module):

        def compiled_forward(original: Callable[..., Any]) -> Callable[..., Any]:
            def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
                return original(self, *args, **kwargs)

            compiled = torch.compile(_with_own_code(forward), backend=backend)
            return lambda self, *args, **kwargs: compiled(self, *args, **kwargs)  # a plain function, as methods are

        patch = vars(module)[_FORWARD_PATCH] = MethodPatch("", "compiled", module, "forward", compiled_forward)
        patch.apply()
        return

    if kind.call is None:

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return modules.eager_call(module)(*args, **kwargs)

        kind.call = torch.compile(_with_own_code(call), backend=backend)
    set_compiled_call(module, functools.partial(kind.call, module))


def _with_own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with a code object of its own.

    Torch keeps compiled versions with the code: a limited number, looked through one after another at every call. All
    the blocks of all models in the process would share them, and past the limit torch runs them eagerly, unseen. Those
    of one kind may, as one version serves them all. The
    code keeps what it was compiled to until ``torch._dynamo.reset()``, as with every function given to torch.compile.
    """
    assert isinstance(function, FunctionType)
    # By names torch tells which sizes change from call to call: those of one block are not another's.
    code = function.__code__.replace(co_name=f"{function.__name__}_{next(_NUMBERS)}")
    return FunctionType(code, function.__globals__, function.__name__, closure=function.__closure__)


def undo_compile(module: nn.Module) -> None:
    """Lets the module's calls run eagerly again."""
    set_compiled_call(module, None)
    if (patch := vars(module).pop(_FORWARD_PATCH, None)) is not None:
        patch.undo()


def eager_call(module: nn.Module) -> Callable[..., Any]:
    """What calls a module past its compiled form."""
    # Within the module's own call its parameters are gathered already; another call would give them back.
    return module.forward if is_gathered_by_hooks(module) else modules.eager_call(module)


def is_gathered_by_hooks(module: nn.Module) -> bool:
    """Whether FSDP gathers the module's parameters in hooks around its forward."""
    # Asked without an import: whoever sharded a module has imported it.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


@contextmanager
def eager_where_compiled(model: nn.Module) -> Iterator[None]:
    """Runs compiled parts of ``model`` eagerly, for a step that is watched by a dispatch or function mode.

    Compiled code called under a dispatch mode runs eagerly ever after, and under a function mode is compiled anew
    (torch 2.13); told to stand aside, it comes back unharmed.
    """
    if any(is_compiled(module) for module in model.modules()):
        with torch.compiler.set_stance("force_eager"):
            yield
    else:
        yield
