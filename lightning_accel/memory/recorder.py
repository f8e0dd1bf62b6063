"""One training step, watched: the order in which blocks were called, the memory at each, and which optimizers step."""

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

from lightning_accel.core.torch_private.autograd import sequence_number
from lightning_accel.core.tree import storages_of, tensors_in
from lightning_accel.memory.meter import Meter


@dataclass(frozen=True, order=True)
class BlockCall:
    """One call of a block in a step: the site, and how many calls of it came before."""

    site: str
    index: int = 0

    def __str__(self) -> str:
        return f"{self.site or '(model)'}{f' (call {self.index + 1})' if self.index else ''}"


@dataclass(frozen=True)
class Mark:
    event: Literal["forward", "forward ended", "backward", "backward ended"]
    call: BlockCall


class StepRecorder:
    """Marks a meter where blocks begin and end, forward and backward.

    Nothing is inserted into the graph: the marks hang on nodes that are there (hooks on nodes, not on tensors, and
    no identity functions, which would make the results of a block views that must not be written into).
    """

    def __init__(self, meter: Meter) -> None:
        self._meter: Meter | None = meter
        self.calls: list[BlockCall] = []  # that have ended their forward pass
        # Of arguments that another call has too: a mask that all blocks get is not freed when one lets go of it.
        self.shared_bytes: Counter[BlockCall] = Counter()
        self._holders: weakref.WeakKeyDictionary[torch.UntypedStorage, list[BlockCall]] = weakref.WeakKeyDictionary()

    def close(self) -> None:
        """Marks no more, though graphs that it watches may still be walked."""
        self._meter = None

    def record(self, call: BlockCall, arguments: Iterable[Tensor], run: Callable[[], Any]) -> Any:
        """Runs a block's forward, and watches it and its backward pass."""
        self._note_holder(call, arguments)
        first = _next_sequence_number()
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


def _next_sequence_number() -> int:
    """The number that the next node of the graph will have, or one below it."""
    return sequence_number(torch.empty(0, requires_grad=True).view(0).grad_fn)


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
    """Remembers which of a model's optimizers have stepped, until :meth:`stop`."""

    def __init__(self) -> None:
        self.seen: list[Optimizer] = []  # that have stepped so far
        self.has_stepped = False  # whether one has since this was last set to False
        self._hooks: list[RemovableHandle] = []

    def watch(self, optimizer: Optimizer) -> None:
        """Looks whenever ``optimizer`` steps from now on."""
        with suppress(AttributeError):  # of what leaves super().__init__() out: it wraps another, which is watched, too
            self._hooks.append(optimizer.register_step_post_hook(self._see))

    def _see(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.has_stepped = True
        if not any(known is optimizer for known in self.seen):
            self.seen.append(optimizer)

    def stop(self) -> None:
        for hook in self._hooks:
            hook.remove()
