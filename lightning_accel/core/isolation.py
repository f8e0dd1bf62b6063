"""A trial leaves no trace: nobody who watches the run sees it, and what it changes is brought back."""

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
    """Whether this call is part of a trial. Hooks that watch the run itself ask that."""
    return _under_trial.get()


@contextmanager
def isolated(module: nn.Module, device: torch.device | None = None) -> Iterator[list[str]]:
    """Brings random streams, buffers, attributes and the active dispatch modes back when it ends.

    Yields:
        A list that holds, once the context has ended, the paths of what had changed, torch's random streams left out.
    """
    snapshot = StateSnapshot(module, Level.FULL, device or device_of(module))
    changed: list[str] = []
    # Nobody sees a trial: not who counts FLOPs or watches storages, nor a checkpoint around this module, which counts
    # what is saved for backward. And no autocast region of the user's reuses a weight that is cast here.
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
    # Autograd leaves this check to the hooks. Without it a trial would pass where the run then raises.
    saved, version = packed
    if version_of(saved) != version:
        raise RuntimeError("a tensor that its backward pass needs was modified in place")
    return saved


def no_cast_cache() -> AbstractContextManager[None]:
    """Inside, an active autocast region casts every weight anew at each use."""
    return temporarily(torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled, False)
