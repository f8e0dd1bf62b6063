"""Records one training step: the order of block calls, the memory at each, and which optimizers step."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_accel.core.torch_private.autograd import latest_node, sequence_number
from lightning_accel.core.tree import storages_of, tensors_in
from lightning_accel.memory.meter import Meter


@dataclass(frozen=True, order=True)
class BlockCall:
    """One call of a block in a step: the site, and how many calls of this block came before."""

    site: str
    index: int = 0

    def __str__(self) -> str:
        return f"{self.site or '(model)'}{f' (call {self.index + 1})' if self.index else ''}"


@dataclass(frozen=True)
class Mark:
    event: Literal["forward", "forward ended", "backward", "backward ended"]
    call: BlockCall


class StepRecorder:
    """Marks the beginning and end of blocks on a meter, forward and backward.

    Nothing is inserted into the graph: the marks are hooks on existing nodes. Hooks on tensors or identity functions
    would turn the results of a block into views that must not be modified in place.
    """

    def __init__(self, meter: Meter) -> None:
        self._meter: Meter | None = meter
        self.calls: list[BlockCall] = []  # whose forward pass has ended
        # Bytes of arguments shared by several calls: one call cannot free a mask that all blocks get.
        self.shared_bytes: Counter[BlockCall] = Counter()
        self._holders: weakref.WeakKeyDictionary[torch.UntypedStorage, list[BlockCall]] = weakref.WeakKeyDictionary()

    def close(self) -> None:
        """Stops marking, even if watched graphs still run backward."""
        self._meter = None

    def record(self, call: BlockCall, arguments: Iterable[Tensor], run: Callable[[], Any]) -> Any:
        """Runs a block's forward and marks it and its backward pass."""
        self._note_holder(call, arguments)
        first = latest_node() + 1
        self._mark(Mark("forward", call))
        outputs = run()
        self._mark(Mark("forward ended", call))
        self.calls.append(call)
        ends = {t.grad_fn for t in tensors_in(outputs) if t.grad_fn is not None}
        nodes = _nodes_since(first, ends)
        if nodes:
            for node in ends.intersection(nodes):
                node.register_prehook(lambda *gradients: self._mark(Mark("backward", call)))
            last = min(nodes, key=sequence_number)
            last.register_hook(lambda *gradients: self._mark(Mark("backward ended", call)))
        return outputs

    def _note_holder(self, call: BlockCall, arguments: Iterable[Tensor]) -> None:
        for storage in storages_of(arguments):
            holders = self._holders.setdefault(storage, [])
            holders.append(call)
            if len(holders) > 1:
                for holder in holders if len(holders) == 2 else (call,):
                    self.shared_bytes[holder] += storage.nbytes()

    def _mark(self, mark: Mark) -> None:
        if self._meter is not None:
            self._meter.mark(mark)


def _nodes_since(first: int, ends: Iterable[Node]) -> set[Node]:
    found: set[Node] = set()
    waiting = list(ends)
    while waiting:
        node = waiting.pop()
        if node in found or hasattr(node, "variable") or sequence_number(node) < first:
            continue
        found.add(node)
        waiting += [following for following, _ in node.next_functions if following is not None]
    return found


class OptimizerWatch:
    """Records which of a model's optimizers have stepped, until :meth:`stop`."""

    def __init__(self) -> None:
        self.seen: list[Optimizer] = []  # those that have stepped
        self.has_stepped = False  # whether one has stepped since this was last reset
        self._hooks: list[RemovableHandle] = []

    def watch(self, optimizer: Optimizer) -> None:
        """Records the steps of ``optimizer`` from now on."""
        with suppress(AttributeError):  # a wrapper without super().__init__(); the wrapped optimizer is watched too
            self._hooks.append(optimizer.register_step_post_hook(self._see))

    def _see(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.has_stepped = True
        if not any(known is optimizer for known in self.seen):
            self.seen.append(optimizer)

    def stop(self) -> None:
        for hook in self._hooks:
            hook.remove()
