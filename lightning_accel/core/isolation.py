"""Leaves no trace: what a trial runs is hidden from whoever watches the run, and what it changes is undone."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_accel.core.device import device_of, own_rng
from lightning_accel.core.engine_var import EngineVar
from lightning_accel.core.patch import temporarily
from lightning_accel.core.snapshot import Snapshot
from lightning_accel.core.torch_private.modes import without_dispatch_modes
from lightning_accel.core.torch_private.tensors import version_of

_under_trial = EngineVar("_under_trial", default=False)


def is_trial() -> bool:
    """Whether this very call is part of a trial, for hooks that watch what the run itself does."""
    return _under_trial.get()


@contextmanager
def isolated(module: nn.Module, device: torch.device | None = None) -> Iterator[list[str]]:
    """Leaves random streams, buffers, plain attributes and the active dispatch modes as they were found.

    Yields:
        A list that holds, once the context is left, the names of what was found changed and restored.
    """
    snapshot = Snapshot(module)
    changed: list[str] = []
    with ExitStack() as stack:
        stack.enter_context(_under_trial.being(True))
        stack.enter_context(own_rng(device or device_of(module)))
        # Someone may be counting FLOPs or watching storages, or (a checkpoint around this module) counting what is
        # saved for backward: a trial is none of their business.
        stack.enter_context(without_dispatch_modes())
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(_pack, _unpack))
        # A weight cast here, under no_grad perhaps, must not be what an autocast region of the user's goes on with.
        stack.enter_context(no_cast_cache())
        stack.callback(torch.clear_autocast_cache)
        try:
            yield changed
        finally:
            changed += snapshot.restore()


def _pack(saved: Tensor) -> tuple[Tensor, int]:
    return saved.detach(), version_of(saved)


def _unpack(packed: tuple[Tensor, int]) -> Tensor:
    # Autograd leaves this check to whoever packs: without it a trial would pass where the run then raises.
    saved, version = packed
    if version_of(saved) != version:
        raise RuntimeError("a tensor that its backward pass needs was modified in place")
    return saved


def no_cast_cache() -> AbstractContextManager[None]:
    """Inside, an autocast region that is in force casts every weight anew at each use."""
    return temporarily(torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled, False)


_HOOKS = frozenset(name for name in vars(nn.Module()) if "_hooks" in name)


def silent_twin(module: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """A copy to run in place of ``module``, without hooks, whose runs change nothing of the module's own.

    Parameters are shared unless they are converted; buffers, plain tensors, lists, dicts and sets are copies, and so
    are the modules inside. A forward that was bound to the instance stays behind.

    Args:
        module: Any module.
        dtype: What its floating-point parameters and tensors are converted to; None: what they are.
    """
    return _twin(module, dtype, {})


def _twin(module: nn.Module, dtype: torch.dtype | None, made: dict[int, Any]) -> nn.Module:
    if id(module) in made:
        twin: nn.Module = made[id(module)]
        return twin
    if isinstance(module, torch.jit.ScriptModule):
        return copy.deepcopy(module) if dtype is None else copy.deepcopy(module).to(dtype)

    def converted(tensor: Tensor) -> Tensor:
        is_wanted = dtype is not None and tensor.is_floating_point()
        return tensor.detach().to(dtype, copy=True) if is_wanted else tensor.detach().clone()

    def part(original: nn.Module | Tensor | None) -> Any:
        if isinstance(original, nn.Module):
            return _twin(original, dtype, made)
        if not isinstance(original, nn.Parameter):
            return None if original is None else converted(original)
        if dtype is None or not original.is_floating_point():
            return original
        if id(original) not in made:  # it may be tied
            made[id(original)] = nn.Parameter(converted(original), original.requires_grad)
        return made[id(original)]

    twin = made[id(module)] = copy.copy(module)
    state = vars(twin)
    state.pop("forward", None)
    for name, value in state.items():
        if name in _HOOKS:
            state[name] = type(value)()
        elif isinstance(value, Tensor):
            state[name] = converted(value)
        elif name in Snapshot.OWN and isinstance(value, dict):  # of parameters, of buffers or of modules
            state[name] = type(value)((key, part(held)) for key, held in value.items())
        elif isinstance(value, list | dict | set):
            state[name] = copy.copy(value)
    return twin
