"""Modules within modules, with what one step's operations took in each: what a page unfolds as deep as one clicks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from lightning_accel.evidence.peaks import Peaks
from lightning_accel.evidence.step_breakdown import OPTIMIZER, Anatomy, ModuleCost

ROOT = "(model)"
MOST = 500
"""Modules that a page shows one by one; of the rest, each parent has the sum."""


@dataclass
class Node:
    """A module and its parts."""

    name: str  # its own name; the whole model's is `(model)`; `(7 more)` stands for so many with little in them
    kind: str = ""  # its class
    forward_ms: float = 0.0  # of its operations and those of its parts, in the forward pass
    backward_ms: float = 0.0  # the same of the backward pass
    flops: int = 0  # of both
    low_precision_flops: int = 0  # of these, those on numbers of 16 bits or less
    moved_bytes: int = 0  # that they read and wrote
    held_bytes: int = 0  # what its forward pass made that was alive at the peak
    parts: list[Node] = field(default_factory=list)  # below it, the most time first

    @property
    def ms(self) -> float:
        return self.forward_ms + self.backward_ms

    @property
    def flops_per_byte(self) -> float | None:
        return self.flops / self.moved_bytes if self.flops and self.moved_bytes else None

    @property
    def gflops_per_sec(self) -> float | None:
        return self.flops / self.ms / 1e6 if self.flops and self.ms > 0 else None

    @property
    def gb_per_sec(self) -> float | None:
        return self.moved_bytes / self.ms / 1e6 if self.moved_bytes and self.ms > 0 else None

    def add(self, cost: ModuleCost | Node, held_bytes: int) -> None:
        """Adds what one module's own operations took, or a node's."""
        self.forward_ms += cost.forward_ms
        self.backward_ms += cost.backward_ms
        self.flops += cost.flops
        self.low_precision_flops += cost.low_precision_flops
        self.moved_bytes += cost.moved_bytes
        self.held_bytes += held_bytes

    def walk(self, depth: int = 0) -> Iterator[tuple[int, Node]]:
        """It and all below it, each with its depth."""
        yield depth, self
        for part in self.parts:
            yield from part.walk(depth + 1)

    def leaves(self, path: str = "") -> Iterator[tuple[str, Node]]:
        """Modules without parts, by their qualified names."""
        if not self.parts:
            yield path or self.name, self
        for part in self.parts:
            yield from part.leaves(f"{path}.{part.name}".lstrip("."))

    def of_the_roof(self, peaks: Peaks) -> float | None:
        """Which part of its time the machine would need at its best; None where it has taken none.

        At its best it computes and moves at once, each as fast as it was measured to. What is found in a cache, and
        not in memory, may come to more than 1.
        """
        if self.ms <= 0:
            return None
        high = (self.flops - self.low_precision_flops) / peaks.float32_flops
        low = self.low_precision_flops / peaks.bfloat16_flops
        return 1e3 * max(high + low, self.moved_bytes / peaks.bytes_per_sec) / self.ms


def tree_of(anatomy: Anatomy, held: Mapping[str, int]) -> Node:
    """The model of a step that was taken apart, with the bytes that each module ``held`` at the peak."""
    costs = {one.module: one for one in anatomy.modules if one.module != OPTIMIZER}
    root = Node(ROOT)
    nodes = {"": root}

    def node_of(path: str) -> Node:
        if path not in nodes:
            parent, _, name = path.rpartition(".")
            nodes[path] = Node(name)
            node_of(parent).parts.append(nodes[path])
        return nodes[path]

    for path in {*costs, *held}:
        cost = costs.get(path, ModuleCost(module=path, kind=""))
        node_of(path).kind = cost.kind
        names = path.split(".") if path else []
        for depth in range(len(names) + 1):
            node_of(".".join(names[:depth])).add(cost, held.get(path, 0))
    return _folded(root)


def _folded(root: Node) -> Node:
    """With those modules summed up that have the least time and memory, where there are many."""

    def worth(node: Node) -> float:
        return max(node.ms / (root.ms or 1.0), node.held_bytes / (root.held_bytes or 1))

    # A module has at least what its parts have: where it goes, they do.
    nodes = sorted((node for _, node in root.walk()), key=worth, reverse=True)
    chosen = {id(node) for node in nodes[:MOST]}
    for node in nodes:
        kept = [part for part in node.parts if id(part) in chosen]
        rest = [part for part in node.parts if id(part) not in chosen]
        node.parts = sorted(kept, key=lambda one: (-one.ms, one.name))
        is_one = len(rest) == 1 and not rest[0].parts
        node.parts += rest if is_one or not rest else [_sum(rest)]
    return root


def _sum(nodes: list[Node]) -> Node:
    count = sum(1 for node in nodes for _ in node.walk())
    total = Node(f"({count:,} more)")
    for node in nodes:
        total.add(node, node.held_bytes)
    return total
