"""One training step, watched: which blocks were called in which order, and the memory before, within and after each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.graph import Node

from lightning_accel.core.tree import tensors_in
from lightning_accel.memory.meter import Interval, Meter
from lightning_accel.memory.saved import ByStorage, has_storage

Event = Literal["forward", "forward ended", "backward", "backward ended"]


@dataclass(frozen=True, order=True)
class Call:
    """One call of a block in a step: the site, and how many calls of it came before."""

    site: str
    index: int = 0

    def __str__(self) -> str:
        return f"{self.site or '(model)'}{f' (call {self.index + 1})' if self.index else ''}"


@dataclass(frozen=True)
class Mark:
    event: Event
    call: Call


class SharedArguments:
    """Arguments that several calls are given: a mask that all blocks get is not freed when one of them lets go of it.

    Attributes:
        shared_bytes: Call → bytes of its arguments that another call has too.
    """

    def __init__(self) -> None:
        self.shared_bytes: Counter[Call] = Counter()
        self._holders: ByStorage[list[Call]] = ByStorage()

    def note(self, call: Call, arguments: Iterable[Tensor]) -> None:
        """Tells that ``call`` is given ``arguments``."""
        for tensor in filter(has_storage, arguments):
            holders = self._holders.get(tensor)
            if holders is None:
                self._holders.set(tensor, [call])
            elif call not in holders:
                for holder in (*holders, call) if len(holders) == 1 else (call,):
                    self.shared_bytes[holder] += tensor.untyped_storage().nbytes()
                holders.append(call)


class StepRecorder:
    """Marks a meter where blocks begin and end, forward and backward.

    Nothing is inserted into the graph: the marks hang on nodes that are there (hooks on nodes, not on tensors, and
    no identity functions, which would make the results of a block views that must not be written into).
    """

    def __init__(self, meter: Meter) -> None:
        self._meter: Meter | None = meter
        self.calls: list[Call] = []

    def close(self) -> None:
        """Marks no more, though graphs that it watches may still be walked."""
        self._meter = None

    def record(self, call: Call, run: Callable[[], Any]) -> Any:
        """Runs a block's forward, and watches it and its backward pass."""
        first = _next_sequence_number()
        self._mark(Mark("forward", call))
        outputs = run()
        self._mark(Mark("forward ended", call))
        self.calls.append(call)
        ends = {t.grad_fn for t in tensors_in(outputs) if t.grad_fn is not None}
        nodes = _nodes_since(first, ends)
        if nodes:
            for node in ends.intersection(nodes):
                node.register_prehook(self._marking(Mark("backward", call)))
            last = min(nodes, key=lambda node: node._sequence_nr())
            last.register_hook(self._marking(Mark("backward ended", call)))
        return outputs

    def _mark(self, mark: Mark) -> None:
        if self._meter is not None:
            self._meter.mark(mark)

    def _marking(self, mark: Mark) -> Callable[..., None]:
        def hook(*gradients: Any) -> None:
            self._mark(mark)

        return hook


def _next_sequence_number() -> int:
    """The number that the next node of the graph will have, or one below it."""
    node: Any = torch.empty(0, requires_grad=True).view(0).grad_fn
    return int(node._sequence_nr())


def _nodes_since(first: int, ends: Iterable[Node]) -> set[Node]:
    found: set[Node] = set()
    waiting = list(ends)
    while waiting:
        node: Any = waiting.pop()
        if node in found or hasattr(node, "variable") or node._sequence_nr() < first:
            continue
        found.add(node)
        waiting += [following for following, _ in node.next_functions if following is not None]
    return found


@dataclass
class CallPeaks:
    """The most that was allocated while a call of a block ran, in bytes; None where it did not run."""

    forward: int | None = None
    backward: int | None = None
    held_at_forward: frozenset[Call] = frozenset()
    held_at_backward: frozenset[Call] = frozenset()


@dataclass
class Timeline:
    """What a metered step showed.

    Attributes:
        calls: The calls of blocks, in the order of their forward passes.
        peaks: The most that was allocated during each.
        outside: The most that was allocated outside all blocks, by the calls that were between forward and backward.
        start_bytes: Allocated when the step began.
        peak_bytes: The most that was allocated at any time.
    """

    calls: list[Call]
    start_bytes: int
    peak_bytes: int
    peaks: dict[Call, CallPeaks] = field(default_factory=dict)
    outside: dict[frozenset[Call], int] = field(default_factory=dict)

    @classmethod
    def of(cls, calls: list[Call], intervals: list[Interval]) -> Timeline:
        timeline = cls(list(calls), intervals[0].level_bytes, max(i.peak_bytes for i in intervals))
        timeline.peaks = {call: CallPeaks() for call in calls}
        held: set[Call] = set()
        forward: Call | None = None
        backward: set[Call] = set()
        for interval in intervals:
            mark = interval.mark
            if isinstance(mark, Mark) and mark.call in timeline.peaks:
                if mark.event == "forward":
                    forward = mark.call
                elif mark.event == "forward ended":
                    forward = None
                    held.add(mark.call)
                elif mark.event == "backward":
                    backward.add(mark.call)
                else:
                    backward.discard(mark.call)
                    held.discard(mark.call)
            timeline._count(interval.peak_bytes, forward, backward, frozenset(held))
        return timeline

    def _count(self, peak: int, forward: Call | None, backward: set[Call], held: frozenset[Call]) -> None:
        if forward is not None:
            peaks = self.peaks[forward]
            if peaks.forward is None or peak > peaks.forward:
                peaks.forward, peaks.held_at_forward = peak, held
        for call in backward:
            peaks = self.peaks[call]
            if peaks.backward is None or peak > peaks.backward:
                peaks.backward, peaks.held_at_backward = peak, held - {call}
        if forward is None and not backward:
            self.outside[held] = max(peak, self.outside.get(held, 0))
