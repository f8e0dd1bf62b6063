"""What the peak of a step's memory consisted of: which tensors were alive at once, whose they were, and what for."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_accel.core.tree import storages_of
from lightning_accel.evidence.step_breakdown import (
    ACTIVATIONS,
    GRADIENTS,
    LOGITS,
    STATES,
    WITHIN,
    WORKSPACE,
    MemoryPeaked,
)


@dataclass
class _Block:
    size: int
    category: str
    module: str = ""
    is_logits: bool = False


class LiveBlocks:
    """Follows the storages of a device's tensors from their making to their end."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._alive: weakref.WeakKeyDictionary[torch.UntypedStorage, _Block] = weakref.WeakKeyDictionary()
        self._ends: list[weakref.ref[torch.UntypedStorage]] = []
        self._events: list[tuple[_Block, int]] = []  # with +1 where it was made, -1 at its end
        self._backward_began: int | None = None

    def hold(self, tensors: Iterable[Tensor], category: str) -> None:
        """Tells of what was there before the step."""
        for tensor in tensors:
            self.made(tensor, category, "")

    def made(self, tensor: Tensor, category: str, module: str) -> bool:
        """Tells of what an operation has returned; whether its storage is a new one."""
        if tensor.device.type != self._device.type:
            return False
        is_new = False
        for storage in storages_of([tensor]):
            if storage in self._alive:
                continue
            is_new = True
            block = self._alive[storage] = _Block(storage.nbytes(), category, module)
            self._events.append((block, 1))
            self._ends.append(weakref.ref(storage, self._ender(block)))
        return is_new

    def is_a(self, tensor: Tensor, category: str) -> bool:
        """Whether a tensor's storage was made as one of a category."""
        return any(block.category == category for block in self._blocks_of([tensor]))

    def are_logits(self, tensor: Tensor) -> None:
        """Tells that a tensor is what a loss over classes reads or makes."""
        for block in self._blocks_of([tensor]):
            block.is_logits = True

    def backward_begins(self) -> None:
        """Tells that what is alive of the forward pass is what the backward pass needs."""
        if self._backward_began is None:
            self._backward_began = len(self._events)

    def peak(
        self, gradients: Iterable[Tensor], states: Iterable[Tensor], metered_bytes: int | None = None
    ) -> MemoryPeaked:
        """What the peak consisted of.

        ``metered_bytes``: the most that was allocated by the allocator's own account; None: not known.
        """
        for tensors, category in ((gradients, GRADIENTS), (states, STATES)):
            for block in self._blocks_of(tensors):
                block.category = category
        self._tell_kept_from_freed()
        held = most = peak = 0
        for number, (block, sign) in enumerate(self._events):
            held += sign * block.size
            if held > most:
                most, peak = held, number + 1
        parts: defaultdict[str, int] = defaultdict(int)
        modules: defaultdict[str, int] = defaultdict(int)
        for block, sign in self._events[:peak]:
            parts[LOGITS if block.is_logits else block.category] += sign * block.size
            if block.category in (ACTIVATIONS, WORKSPACE):
                modules[block.module] += sign * block.size
        if metered_bytes is not None and metered_bytes > most:
            parts[WITHIN], most = metered_bytes - most, metered_bytes
        return MemoryPeaked(
            peak_bytes=most,
            parts={name: size for name, size in parts.items() if size},
            modules={name: size for name, size in modules.items() if size},
        )

    def _blocks_of(self, tensors: Iterable[Tensor]) -> list[_Block]:
        found = [self._alive.get(storage) for storage in storages_of(tensors)]
        return [block for block in found if block is not None]

    def _ender(self, block: _Block) -> Callable[[weakref.ref[torch.UntypedStorage]], None]:
        events = self._events
        return lambda _: events.append((block, -1))

    def _tell_kept_from_freed(self) -> None:
        """What the forward pass made and freed before the backward pass was its workspace."""
        if self._backward_began is None:
            return
        for block, sign in self._events[: self._backward_began]:
            if block.category in (ACTIVATIONS, WORKSPACE):
                block.category = ACTIVATIONS if sign > 0 else WORKSPACE
