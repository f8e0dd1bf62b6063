"""Which modules have an in-place form at all, and what forbids it before anything else is looked at."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from lightning_accel.compiled import is_compiled
from lightning_accel.host import Host

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def find_sites(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that could overwrite their input and do not, by qualified name."""
    return {name: module for name, module in model.named_modules() if _has_inplace_form(module)}


def _has_inplace_form(module: nn.Module) -> bool:
    forward = type(module).forward
    return (
        getattr(module, "inplace", None) is False
        and getattr(forward, "__module__", "").startswith("torch.nn.modules")
        # nn.AlphaDropout has the attribute, and its forward ignores it.
        and "inplace" in getattr(getattr(forward, "__code__", None), "co_names", ())
    )


def unfit(module: nn.Module, host: Host) -> str | None:
    """Why ``module`` cannot work in place wherever it stands, in words; None when it can."""
    if isinstance(module, nn.LeakyReLU) and module.negative_slope < 0:
        return f"its backward cannot work in place with negative_slope={module.negative_slope}"
    if isinstance(module, nn.ELU | nn.CELU) and module.alpha < 0:
        return f"its backward cannot work in place with alpha={module.alpha}"
    if isinstance(module, nn.RReLU) and module.lower < 0:
        return f"its backward cannot work in place with lower={module.lower}"
    if type(module).forward is nn.Dropout.forward and host.kind in ("cuda", "rocm"):
        return "in place, a GPU's dropout keeps a full-width mask, not one byte an element, and draws other numbers"
    if is_rewired(module):
        return "its forward or __call__ is not the one of its class"
    hook = hook_on(module)
    return f"{hook} on it may keep its input" if hook else None


def is_rewired(module: nn.Module) -> bool:
    """Whether calling ``module`` runs something else than the ``forward`` that its class shows."""
    return (
        "forward" in vars(module)
        or type(module).__call__ is not nn.Module.__call__
        or isinstance(module, torch.jit.ScriptModule)
    )


def compiled_part(named: Mapping[str, nn.Module]) -> str | None:
    """The name of a compiled module. Code that Dynamo first meets under a dispatch mode is never compiled again."""
    for name, module in named.items():
        if is_compiled(module) or getattr(module, "_compiler_ctx", None) is not None:
            return name or "the model"
    return None


def hook_on(module: nn.Module, kinds: Iterable[str] = _HOOKS) -> str | None:
    """What kind of hook ``module`` carries, in words; None without any of ``kinds``."""
    for kind in kinds:
        if getattr(module, kind, None):
            return f"a {kind.strip('_').removesuffix('s').replace('_', ' ')}"
    return None


def global_hook() -> str | None:
    """Why hooks on all modules forbid in-place work; PyTorch's own (its FLOP counter's) keep no tensors."""
    for kind in _HOOKS:
        hooks: dict[int, Any] = getattr(torch_module, f"_global{kind}", {})
        for hook in hooks.values():
            if not str(getattr(hook, "__module__", "")).startswith("torch."):
                return f"a hook on all modules ({getattr(hook, '__qualname__', hook)!s}) may keep its input"
    return None
