"""What `torch.compile` and the rest of the package must know of each other."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from lightning_accel.core import torch_private
from lightning_accel.core.patch import MethodPatch

_NUMBERS = itertools.count()
_FORWARD_PATCH = "lightning_accel_compiled_forward"


def is_compiled(module: nn.Module) -> bool:
    """Whether calls of this very module run compiled code, by ``module.compile()`` or ``torch.compile(module)``."""
    return (
        _was_compiled_by_lightning(module)
        or _FORWARD_PATCH in vars(module)
        or torch_private.compiled_call(module) is not None
        or type(module).__name__ == "OptimizedModule"
    )


def _was_compiled_by_lightning(module: nn.Module) -> bool:
    """Whether Lightning got it as ``torch.compile(module)``: it has then put compiled methods on the original."""
    return any(hasattr(vars(module).get(name), "get_compiler_config") for name in ("forward", "training_step"))


def is_inside_compiled(model: nn.Module, site: str) -> bool:
    """Whether the module at ``site``, or one around it, is compiled."""
    parts = site.split(".") if site else []
    return any(is_compiled(model.get_submodule(".".join(parts[:depth]))) for depth in range(len(parts) + 1))


def compile_call(
    module: nn.Module, options: dict[str, Any], prepare: Callable[[GraphModule], None] = lambda graph: None
) -> None:
    """Compiles a module's call in place, as ``module.compile()`` does for modules of the user's own.

    Of one that FSDP shards only the forward is compiled, within the hooks that gather its parameters: the compiler
    leaves those hooks out. ``options`` are TorchInductor's; ``prepare`` edits a captured graph before it gets it.

    For those of ``torch.nn`` itself (``nn.TransformerEncoderLayer``, ``nn.Sequential``) that silently compiles
    nothing: the compiler starts at no frame whose code is torch's (torch 2.13). Here it starts at one of ours.
    """

    def backend(graph: GraphModule, inputs: list[Tensor]) -> Any:
        prepare(graph)
        return torch_private.compile_with_inductor(graph, inputs, options)

    if is_gathered_by_hooks(module):

        def compiled_forward(original: Callable[..., Any]) -> Callable[..., Any]:
            def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
                return original(self, *args, **kwargs)

            compiled = torch.compile(_with_own_code(forward), backend=backend)
            return lambda self, *args, **kwargs: compiled(self, *args, **kwargs)  # a plain function, as methods are

        patch = vars(module)[_FORWARD_PATCH] = MethodPatch("", "compiled", module, "forward", compiled_forward)
        patch.apply()
        return

    def call(*args: Any, **kwargs: Any) -> Any:
        return torch_private.eager_call(module)(*args, **kwargs)

    torch_private.set_compiled_call(module, torch.compile(_with_own_code(call), backend=backend))


def _with_own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with a code object of its own.

    Torch keeps compiled versions with the code: a limited number, looked through one after another at every call. All
    the blocks of all models in the process would share them, and past the limit torch runs them eagerly, unseen. The
    code keeps what it was compiled to until ``torch._dynamo.reset()``, as with every function given to torch.compile.
    """
    assert isinstance(function, FunctionType)
    # By names torch tells which sizes change from call to call: those of one block are not another's.
    code = function.__code__.replace(co_name=f"{function.__name__}_{next(_NUMBERS)}")
    return FunctionType(code, function.__globals__, function.__name__, closure=function.__closure__)


def undo_compile(module: nn.Module) -> None:
    """Lets the module's calls run eagerly again."""
    torch_private.set_compiled_call(module, None)
    if (patch := vars(module).pop(_FORWARD_PATCH, None)) is not None:
        patch.undo()


def eager_call(module: nn.Module) -> Callable[..., Any]:
    """What calls a module past its compiled form."""
    # Within the module's own call its parameters are gathered already; another call would give them back.
    return module.forward if is_gathered_by_hooks(module) else torch_private.eager_call(module)


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
