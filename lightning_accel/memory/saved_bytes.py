"""Measures what a call keeps from its forward to its backward pass: the tensors that outlive it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from typing_extensions import override

from lightning_accel.core.isolation import isolated
from lightning_accel.core.torch_private.modes import DispatchMode
from lightning_accel.core.tree import storages_of, tensors_in
from lightning_accel.experiment.passes import Passes


def kept_bytes(block: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Runs a call once, on copies of its arguments, and counts the storages alive afterwards, without its results.

    Storages are counted, not what autograd reports as saved: a recomputed call keeps its arguments elsewhere. The
    allocator is not used, so no peak counter is reset. The block and the random state stay as they were.
    """
    with isolated(block), torch.enable_grad():
        _, inputs = Passes(block).copies(args, kwargs)
        made = _Made()
        made.storages.update(storages_of(tensors_in(inputs)))
        with made:
            results = call(*inputs[0], **inputs[1])
        del inputs
        others = storages_of([*tensors_in(results), *block.parameters(), *block.buffers()])  # weights may be among them
        return sum(storage.nbytes() for storage in made.storages if storage not in others)


class _Made(DispatchMode):  # type: ignore[no-untyped-call]
    """Records the storages that operations create, while they live."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: WeakSet[torch.UntypedStorage] = WeakSet()

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.storages.update(storages_of(tensors_in(made)))
        return made
