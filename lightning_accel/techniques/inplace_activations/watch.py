"""Proof 2: on one real step, run with the originals, nobody but the activation reads its input from then on."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import module as torch_module
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from lightning_accel.isolation import is_trial
from lightning_accel.techniques.inplace_activations import catalog
from lightning_accel.techniques.inplace_activations.ownership import SAVING_RESULT_IN_PLACE, Proof
from lightning_accel.techniques.inplace_activations.replay import differs_in_place
from lightning_accel.techniques.inplace_activations.sites import global_hook, hook_on, is_rewired

_PRODUCER_HOOKS = ("_forward_hooks", "_backward_hooks", "_backward_pre_hooks")


@contextmanager
def watched(sites: Mapping[str, nn.Module], proofs: Mapping[str, Proof]) -> Iterator[dict[str, str | None]]:
    """Watches one step. Once it is left, what it yields says: site → why not in place, None if nothing is against it.

    Only the forward pass is watched: backward reads what forward saved, and nothing else.
    """
    findings: dict[str, str | None] = {site: _changed_since(sites[site], proofs[site]) for site in sites}
    active = {site: module for site, module in sites.items() if findings[site] is None}
    if not active:
        yield findings
        return
    watch = _Watch(active, proofs)
    with ExitStack() as stack:
        for site, module in active.items():
            before, after = watch.hooks(site)
            stack.callback(module.register_forward_pre_hook(before).remove)
            stack.callback(module.register_forward_hook(after, always_call=True).remove)
        stack.enter_context(saved_tensors_hooks(watch.saving, _as_it_is))
        stack.enter_context(watch)
        try:
            yield findings
        finally:
            for site in active:
                findings[site] = watch.finding(site)


def _changed_since(site: nn.Module, proof: Proof) -> str | None:
    """Callbacks may have added hooks, or replaced a forward, since the code was read."""
    if is_rewired(site):
        return "its forward or __call__ is not the one of its class"
    for module in (site, *proof.producers):
        passes_on = module is site or catalog.is_plainly(module, catalog.PASSING_MODULES)
        hook = hook_on(module) if passes_on else hook_on(module, _PRODUCER_HOOKS)
        if hook is not None:
            return f"{hook} on {'it' if module is site else type(module).__name__} may keep its input"
    return global_hook()


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


class _Storages:
    """A set of storages that keeps no memory alive. No other storage gets the address of a dead one in the set."""

    def __init__(self) -> None:
        self._references: dict[int, StorageWeakRef] = {}

    def add(self, tensor: Tensor) -> int:
        reference = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        self._references.setdefault(reference.cdata, reference)
        return int(reference.cdata)

    def __contains__(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._references


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows the storages of a step: which were made in it, saved for backward, given to a site."""

    def __init__(self, sites: Mapping[str, nn.Module], proofs: Mapping[str, Proof]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sites = sites
        self._proofs = proofs
        self._calls = dict.fromkeys(sites, 0)
        self._problems: dict[str, str] = {}
        self._made, self._older, self._saved, self._given = _Storages(), _Storages(), _Storages(), _Storages()
        self._inputs: dict[int, str] = {}
        self._results: dict[int, str] = {}
        self._active: list[str] = []
        self._probed = False

    def finding(self, site: str) -> str | None:
        if site in self._problems:
            return self._problems[site]
        return None if self._calls[site] else "it was not called on the step that was watched"

    def _refuse(self, site: str, reason: str) -> None:
        self._problems.setdefault(site, reason)

    # Around every operation

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = _tensors((args, kwargs))
        # A backward pass inside the step (manual optimization, gradient penalties) reads what activations saved.
        if torch._C._current_graph_task_id() == -1:
            for tensor in inputs:
                self._is_read(tensor, func)
        result = func(*args, **kwargs)
        for tensor in _tensors(result):
            if tensor not in self._older:
                self._made.add(tensor)
        return result

    def _is_read(self, tensor: Tensor, func: Any) -> None:
        if tensor not in self._made:
            self._older.add(tensor)
        storage = tensor.untyped_storage()._cdata
        site = self._inputs.get(storage)
        if site is not None and site not in self._active:
            self._refuse(site, f"its input is read again by {func} on the step that was watched")
        made_by = self._results.get(storage)
        if made_by is not None and func._schema.is_mutable and made_by not in self._active:
            self._refuse(made_by, f"its result, which it would need for the backward pass, is overwritten by {func}")

    def saving(self, tensor: Tensor) -> Tensor:
        """Called with every tensor that autograd saves."""
        self._probed = True
        if _is_followed(tensor):
            self._saved.add(tensor)
        return tensor

    # Around every call of a site

    def hooks(self, site: str) -> tuple[Any, Any]:
        def before(module: nn.Module, args: tuple[Any, ...]) -> None:
            if is_trial():
                return
            self._calls[site] += 1
            self._active.append(site)
            if site not in self._problems:
                try:
                    problem = self._check(site, module, args)
                except Exception as error:  # a check must never break the user's step
                    problem = f"it could not be checked: {type(error).__name__}: {error}"
                if problem is not None:
                    self._refuse(site, problem)

        def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if is_trial():
                return
            self._active.remove(site)
            if output is None:
                self._refuse(site, "it raised an exception on the step that was watched")
            # In evaluation dropout gives its very input: whoever reads that reads the result.
            given = {tensor.untyped_storage()._cdata for tensor in _tensors(output)}
            for tensor in _tensors(args):
                if tensor.untyped_storage()._cdata in given:
                    continue
                self._inputs[self._given.add(tensor)] = site
            for tensor in _tensors(output) if isinstance(module, SAVING_RESULT_IN_PLACE) else ():
                self._results[self._given.add(tensor)] = site

        return before, after

    def _check(self, site: str, module: nn.Module, args: tuple[Any, ...]) -> str | None:
        if len(module._forward_pre_hooks) > 1 or len(module._forward_hooks) > 1:
            return "a forward hook on it may keep its input"
        if len(args) != 1 or type(args[0]) is not Tensor or not _is_followed(args[0]):
            return "its input is no plain tensor"
        x = args[0]
        if x._is_view():
            return "its input is a view: autograd would copy what it is a view of (nn.Linear gives one on 3-D input)"
        if x.is_leaf and x.requires_grad:
            return "its input is a leaf of the graph"
        if x not in self._made:
            return "its input is older than the step: a parameter, a buffer or the batch"
        if x in self._saved:
            return "its input is saved for the backward pass by an earlier operation"
        if x.untyped_storage()._cdata in self._inputs:
            return f"its input went through {self._inputs[x.untyped_storage()._cdata]} before"
        return (
            self._check_caller(site)
            or self._check_surroundings(x)
            or (differs_in_place(module, x) if self._calls[site] == 1 else None)
        )

    def _check_caller(self, site: str) -> str | None:
        frame: types.FrameType | None = sys._getframe(3)
        while frame is not None and frame.f_code.co_filename in (torch_module.__file__, __file__):
            frame = frame.f_back
        if frame is not None:
            selves = [frame.f_locals.get(name) for name in ("self", *frame.f_code.co_varnames[:1])]
            if any((frame.f_code, id(found)) in self._proofs[site].callers for found in selves):
                return None
        where = "" if frame is None else f" ({frame.f_code.co_name}, line {frame.f_lineno})"
        return f"it is called from code that was not proven{where}"

    def _check_surroundings(self, x: Tensor) -> str | None:
        frame: types.FrameType | None = sys._getframe()
        while frame is not None:
            if frame.f_code.co_filename == checkpoint.__file__:
                return "it stands inside a checkpointed block, whose activations are recomputed anyway"
            frame = frame.f_back
        if torch.is_grad_enabled():
            self._probed = False
            with _disable_current_modes():
                torch.ones(1, device=x.device, requires_grad=True).exp()
            if not self._probed:
                return "it stands inside other saved-tensor hooks (checkpointing, offloading)"
        return None


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and _is_followed(leaf)]


def _is_followed(tensor: Tensor) -> bool:
    """Sparse tensors, and the wrappers of functional transforms, have no storage to follow."""
    return tensor.layout == torch.strided and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
