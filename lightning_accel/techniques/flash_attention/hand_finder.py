"""Finds the modules that may spell attention out: whose own code names both a softmax and a matrix product.

A first sieve, wide on purpose. What is caught is decided on the graph of what the module really runs.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lightning_accel.core.compiled import is_inside_compiled
from lightning_accel.techniques.base import Refusal
from lightning_accel.techniques.flash_attention.hand_written import Capture, HandWrittenSite
from lightning_accel.techniques.flash_attention.sites import Forward

_SOFTMAX = frozenset(("softmax", "Softmax", "_softmax"))
_PRODUCT = frozenset(("matmul", "bmm", "mm", "baddbmm", "einsum", "__matmul__", "contract"))
_DEPTH = 6  # functions calling functions


def find_hand_written(
    model: nn.Module, claimed: frozenset[nn.Module] = frozenset()
) -> Iterator[HandWrittenSite | Refusal]:
    """Every module of ``model`` that may hold attention of its own.

    Args:
        model: Any module.
        claimed: Modules that another finder has; they are passed over.
    """
    shared: dict[Forward, Capture] = {}
    is_unmade = any(is_lazy(parameter) for parameter in model.parameters())
    for site, module in candidates(model).items():
        if module in claimed:
            continue
        if is_unmade:
            yield Refusal(site, "the model has lazy parameters: run it once before, and they will be there")
        elif "forward" in vars(module):
            yield Refusal(site, "its forward is not the one of its class")
        elif is_inside_compiled(model, site):
            yield Refusal(site, "inside a compiled module: what the compiler sees is left to it")
        else:
            yield HandWrittenSite(site, module, shared)


def candidates(model: nn.Module) -> dict[str, nn.Module]:
    """Site → module, for the modules whose code names a softmax and a product."""
    modules = {site: module for site, module in model.named_modules() if _has_own_code(module)}
    whole = {site: module for site, module in modules.items() if _names(module) == {"softmax", "product"}}
    shared = {
        site: module
        for site, module in modules.items()
        if site not in whole
        # The softmax, masked perhaps, in a module of its own: but not a whole model with attention further down.
        and _names(module) == {"product"}
        and any(_names(child) == {"softmax"} for child in module.children())
    }
    found = {site: module for site, module in modules.items() if site in whole or site in shared}
    # What holds attention further down is more likely a whole model with a softmax at its end; captured, it would
    # take its parts' attention along.
    return {site: module for site, module in found.items() if not any(_is_inside(other, site) for other in found)}


def _is_inside(site: str, other: str) -> bool:
    return site != other and site.startswith(f"{other}." if other else "")


def _has_own_code(module: nn.Module) -> bool:
    return not type(module).__module__.startswith("torch.") and not isinstance(module, torch.jit.ScriptModule)


def _names(module: nn.Module) -> set[str]:
    if isinstance(module, nn.Softmax):
        return {"softmax"}
    if not _has_own_code(module):
        return set()
    forward = getattr(type(module), "forward", None)
    return _Names(module).of(forward) if isinstance(forward, types.FunctionType) else set()


class _Names:
    """What a module's functions name, those that they call included."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._seen: set[types.CodeType] = set()
        self._found: set[str] = set()

    def of(self, function: Any) -> set[str]:
        self._read_callable(function, _DEPTH)
        return self._found

    def _read_callable(self, function: Any, depth: int) -> None:
        if isinstance(function, functools.partial):
            function = function.func
        function = getattr(function, "__wrapped__", function)
        function = getattr(function, "__func__", function)
        if not isinstance(function, types.FunctionType):
            function = vars(type(function)).get("__call__")  # of an object of the user's own
        if not isinstance(function, types.FunctionType) or (function.__module__ or "").startswith("torch."):
            return
        self._read(function.__code__, function.__globals__, depth)
        for cell in function.__closure__ or ():
            self._follow(_content(cell), depth)

    def _read(self, code: types.CodeType, variables: dict[str, Any], depth: int) -> None:
        if code in self._seen or depth == 0:
            return
        self._seen.add(code)
        names, has_product = _names_in(code)
        if has_product or names & _PRODUCT:
            self._found.add("product")
        if names & _SOFTMAX:
            self._found.add("softmax")
        for name in names:
            if isinstance(self._module._modules.get(name), nn.Softmax):
                self._found.add("softmax")
            self._follow(vars(self._module).get(name), depth)
            if name != "forward":
                self._follow(getattr(type(self._module), name, None), depth)
            found = variables.get(name)
            self._follow(found, depth)
            if isinstance(found, types.ModuleType) and not found.__name__.startswith(("torch", "numpy")):
                for attribute in names:
                    self._follow(vars(found).get(attribute), depth)

    def _follow(self, value: Any, depth: int) -> None:
        if callable(value) and not isinstance(value, type | nn.Module):
            self._read_callable(value, depth - 1)


@functools.lru_cache(maxsize=4096)
def _names_in(code: types.CodeType) -> tuple[frozenset[str], bool]:
    """The names in a function and those inside it, and whether it has an ``@``."""
    names = set(code.co_names)
    has_product = any(
        instruction.opname == "BINARY_MATRIX_MULTIPLY"  # until Python 3.10
        or (instruction.opname == "BINARY_OP" and instruction.argrepr in ("@", "@="))
        for instruction in dis.get_instructions(code)
    )
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner, inner_has = _names_in(constant)
            names |= inner
            has_product |= inner_has
    return frozenset(names), has_product


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not yet filled
        return None
