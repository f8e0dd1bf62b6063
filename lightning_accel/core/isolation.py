"""Runs trials without a trace: observers of the run do not see a trial, and its changes are undone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn

from lightning_accel.core.device import device_of
from lightning_accel.core.engine_var import EngineVar
from lightning_accel.core.patch import temporarily
from lightning_accel.core.random_streams import TORCHS
from lightning_accel.core.state_snapshot import Level, StateSnapshot
from lightning_accel.core.torch_private.modes import without_dispatch_modes
from lightning_accel.core.torch_private.tensors import version_of

_under_trial = EngineVar("_under_trial", default=False)


def is_trial() -> bool:
    """Returns whether this call is part of a trial. Hooks that observe the run ask this."""
    return _under_trial.get()


@contextmanager
def isolated(module: nn.Module, device: torch.device | None = None) -> Iterator[list[str]]:
    """Restores random streams, buffers, attributes and the active dispatch modes at the end of the context.

    Yields:
        A list that holds, after the context, the paths of what had changed, without torch's random streams.
    """
    snapshot = StateSnapshot(module, Level.FULL, device or device_of(module))
    changed: list[str] = []
    # Hides the trial from FLOP counters, from modes that watch storages, and from a checkpoint around this module,
    # which counts saved tensors. An autocast region of the user must not reuse a weight that is cast here.
    hooks = torch.autograd.graph.saved_tensors_hooks(_pack, _unpack)
    with _under_trial.being(True), without_dispatch_modes(), hooks, no_cast_cache():
        try:
            yield changed
        finally:
            torch.clear_autocast_cache()
            changed += [path for path in snapshot.restore() if path not in TORCHS]


def _pack(saved: Tensor) -> tuple[Tensor, int]:
    return saved.detach(), version_of(saved)


def _unpack(packed: tuple[Tensor, int]) -> Tensor:
    # With hooks, autograd skips this check. Without it a trial would pass where the run then raises.
    saved, version = packed
    if version_of(saved) != version:
        raise RuntimeError("a tensor that its backward pass needs was modified in place")
    return saved


def no_cast_cache() -> AbstractContextManager[None]:
    """Makes an active autocast region cast every weight anew at each use."""
    return temporarily(torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled, False)
