"""Finds every attention of a model, whichever way it was written, and explains what it found.

A module that says how to switch its attention (a transformers interface, a ``fused_attn``) is taken at its word. Of the
others the code is read, for a softmax and a matrix product: a first sieve, wide on purpose. What is caught is decided
on the graph of what the module really runs.
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
from lightning_accel.core.isolation import isolated
from lightning_accel.core.live_tensors import content_of
from lightning_accel.core.patch import MethodPatch, PatchSet, applied
from lightning_accel.core.report import one_line
from lightning_accel.techniques.flash_attention.backends import BACKENDS
from lightning_accel.techniques.flash_attention.hand_written import Capture, HandWrittenSite
from lightning_accel.techniques.flash_attention.sites import (
    AttentionSite,
    Forward,
    find_fused_attn,
    find_huggingface,
    find_multihead,
)
from lightning_accel.techniques.site import Site

_PRODUCTS = frozenset(("@", "matmul", "bmm", "mm", "baddbmm", "addmm", "einsum", "__matmul__", "contract"))
_SOFTMAXES = frozenset(("softmax", "Softmax", "safe_softmax"))
_DEPTH = 6  # functions calling functions


def find_sites(model: nn.Module) -> Iterator[AttentionSite | Site]:
    """The attention sites of ``model``, each once, and what looked like one and is left alone."""
    claimed: set[nn.Module] = set()
    for find in (find_multihead, find_huggingface, find_fused_attn, _find_hand_written):
        for claim in find(model):
            module = model.get_submodule(claim.site)
            if module not in claimed:
                claimed.add(module)
                yield claim


def _find_hand_written(model: nn.Module) -> Iterator[HandWrittenSite | Site]:
    shared: dict[Forward, Capture] = {}
    is_unmade = any(is_lazy(parameter) for parameter in model.parameters())
    for site, module in _candidates(model).items():
        if is_unmade:
            yield Site(site, why_not="the model has lazy parameters: run it once before, and they will be there")
        elif "forward" in vars(module):
            yield Site(site, why_not="its forward is not the one of its class")
        elif is_inside_compiled(model, site):
            yield Site(site, why_not="inside a compiled module: what the compiler sees is left to it")
        else:
            yield HandWrittenSite(site, module, shared)


def _candidates(model: nn.Module) -> dict[str, nn.Module]:
    """Site → module, for the modules whose code names a softmax and a product."""
    found = {}
    for site, module in model.named_modules():
        parts = _parts_in(module)
        # The softmax, masked perhaps, may be in a module of its own: but not a whole model with attention further down.
        if len(parts) == 2 or (parts == {"product"} and any(_parts_in(m) == {"softmax"} for m in module.children())):
            found[site] = module
    # What holds attention further down is more likely a whole model with a softmax at its end; captured, it would
    # take its parts' attention along.
    return {
        site: module
        for site, module in found.items()
        if not any(other != site and other.startswith(f"{site}." if site else "") for other in found)
    }


def _parts_in(module: nn.Module) -> set[str]:
    """Which of ``"softmax"`` and ``"product"`` a module's own code names."""
    if isinstance(module, nn.Softmax):
        return {"softmax"}
    forward = getattr(type(module), "forward", None)
    is_torch = type(module).__module__.startswith("torch.") or isinstance(module, torch.jit.ScriptModule)
    parts: set[str] = set()
    if isinstance(forward, types.FunctionType) and not is_torch:
        _read(forward, module, _DEPTH, parts, set())
    return parts


def _read(function: Any, module: nn.Module, depth: int, parts: set[str], seen: set[types.CodeType]) -> None:
    """Adds what a function, and those that it calls, name of the two."""
    if isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__wrapped__", function)
    function = getattr(function, "__func__", function)
    if not isinstance(function, types.FunctionType):
        function = vars(type(function)).get("__call__")  # of an object of the user's own
    if not isinstance(function, types.FunctionType) or (function.__module__ or "").startswith("torch."):
        return
    if function.__code__ in seen or depth == 0:
        return
    seen.add(function.__code__)
    names = _names_in(function.__code__)
    if names & _PRODUCTS:
        parts.add("product")
    is_by_exp = "exp" in names and names & {"sum", "logsumexp", "log_softmax"}
    is_by_module = any(name in names and isinstance(child, nn.Softmax) for name, child in module.named_children())
    if is_by_exp or is_by_module or any(name.lstrip("_") in _SOFTMAXES for name in names):
        parts.add("softmax")
    called = [content_of(cell) for cell in function.__closure__ or ()]
    for name in names:
        found = function.__globals__.get(name)
        called += [found, vars(module).get(name), getattr(type(module), name, None) if name != "forward" else None]
        if isinstance(found, types.ModuleType) and not found.__name__.startswith(("torch", "numpy")):
            called += [vars(found).get(attribute) for attribute in names]
    for value in called:
        if callable(value) and not isinstance(value, type | nn.Module):
            _read(value, module, depth - 1, parts, seen)


@functools.lru_cache(maxsize=4096)
def _names_in(code: types.CodeType) -> frozenset[str]:
    """The names in a function and those inside it, ``"@"`` among them where it multiplies matrices."""
    names = set(code.co_names)
    for instruction in dis.get_instructions(code):
        # An operation of its own until Python 3.10.
        if instruction.opname == "BINARY_MATRIX_MULTIPLY" or instruction.argrepr in ("@", "@="):
            names.add("@")
    return frozenset(names).union(*(_names_in(inner) for inner in code.co_consts if isinstance(inner, types.CodeType)))


# -- explained --------------------------------------------------------------------------------------------------------


def explain(module: nn.Module, *inputs: Any, **kwargs: Any) -> str:
    """Says, for each place in ``module`` that computes attention, what flash attention makes of it.

    Attention that is written by hand is found in what a module really runs: give the inputs of one call, and the module
    runs once on them, in the mode and on the device that it is in. Its buffers and random streams are as before
    afterwards. Nothing is tried: whether a backend has the same numbers and is faster shows when a model is trained.

    Args:
        module: Any module.
        *inputs: What it is called with; without any, code that would have to run is named only.
        **kwargs: Likewise.

    Returns:
        A text to print: a paragraph a site.
    """
    sites, is_run = list(find_sites(module)), bool(inputs or kwargs)
    failures: dict[str, str] = {}
    if is_run:
        captured = [site for site in sites if isinstance(site, HandWrittenSite)]
        wraps = ((site, functools.partial(_captured, site, failures)) for site in captured)
        patches = (MethodPatch(site.site, "captured", site.module, "forward", wrap) for site, wrap in wraps)
        with isolated(module), applied(PatchSet(patches)):
            module(*inputs, **kwargs)
    lines = []
    for site in sites:
        lines.append(f"{site.site or 'the module itself'} ({type(module.get_submodule(site.site)).__name__})")
        told = [f"failed: {failures[site.site]}"] if site.site in failures else _told(site, is_run)
        lines += [f"  {line}" for line in told]
    return "\n".join(lines) or "no attention: no module's code names both a softmax and a matrix product"


def _captured(site: HandWrittenSite, failures: dict[str, str], original: Forward) -> Forward:
    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        try:
            return site.run(BACKENDS["sdpa"], original, args, kwargs)
        except Exception as error:
            failures[site.site] = one_line(error)
            return original(module, *args, **kwargs)  # raises what is the user's own

    return forward


def _told(site: AttentionSite | Site, is_run: bool) -> list[str]:
    if isinstance(site, Site):
        return [f"left alone: {site.why_not}"]
    if not isinstance(site, HandWrittenSite):
        return [f"{site.what}: taken at its word, nothing to capture"]
    if not is_run:
        return ["names a softmax and a matrix product: give explain() the inputs of a call to see more"]
    if site.capture is None:
        return [f"not captured: {site.nothing_found() or 'this call did not come to it'}"]
    found = dict.fromkeys(line for finding in site.capture.findings for line in str(finding).splitlines())
    return list(found) or [f"nothing to fuse: {site.nothing_found()}"]
