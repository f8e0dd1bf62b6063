"""Scores on their way to the softmax, and weights behind it: which dimension is which, and what was done to them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from lightning_accel.techniques.flash_attention.call import Edit
from lightning_accel.techniques.flash_attention.graph import (
    VIEWS,
    Labels,
    equal_sizes,
    op_name,
    permuted,
    rank,
    sizes_of_view,
    value,
    written_by,
)

_RESHAPES = ("view", "unsqueeze", "squeeze", "flatten", "unflatten")
_SWITCHES = ("grad_enabled", "autocast", "inference_mode")


class NotAttentionError(Exception):
    """Why something that looked like attention is left alone; the text goes into the report."""


def need(condition: bool, reason: str) -> None:
    if not condition:
        raise NotAttentionError(reason)


class LabelledScores:
    """Dimensions by their labels, which stay with them when they are moved."""

    def __init__(self, labels: Labels, row: Hashable, column: Hashable) -> None:
        self.labels = labels  # of the dimensions at the node that was read last; the others are among them
        self.row, self.column = row, column
        self.batch = [label for label in labels if label not in (row, column)]  # after a reshape, new
        self.levels: list[Sequence[Any]] = [()]
        self.edits: list[Edit] = []

    def move(self, node: Node, before: Node) -> bool:
        """Follows a transposition or a reshape; False if the node is neither."""
        moved = permuted(node, self.labels)
        if moved is not None:
            self.labels = moved
        elif op_name(node) in _RESHAPES and node.args[0] is before:
            self._reshape(node, before)
        else:
            return False
        return True

    def _reshape(self, node: Node, before: Node) -> None:
        """A reshape may fold and unfold batch dimensions; queries and keys must stay the last two."""
        shape, old, last_two = value(node).shape, value(before).shape, self.labels[-2:]
        is_moved = list(self.labels[:-2]) != self.batch or set(last_two) != {self.row, self.column}
        is_kept = not is_moved and len(shape) >= 2 and equal_sizes(shape[-2:], old[-2:])
        need(is_kept, "its scores or weights are reshaped across queries and keys")
        sizes: Sequence[Any] = [size if isinstance(size, int) else -1 for size in shape[:-2]]
        if sizes.count(-1) > 1:
            sizes = sizes_of_view(node)[:-2] if op_name(node) == "view" else ()
            is_known = len(sizes) == len(shape) - 2 and all(isinstance(size, int | Node) for size in sizes)
            need(is_known, "its scores or weights are reshaped in a way that is not understood")
        self.levels.append(sizes)
        self.batch = [("level", len(self.levels), index) for index in range(len(sizes))]
        self.labels = (*self.batch, *last_two)

    def is_same_for_all_keys(self, tensor: Node) -> bool:
        from_end = len(self.labels) - self.labels.index(self.column)
        return rank(tensor) < from_end or statically_known_true(value(tensor).shape[-from_end] == 1)

    def edit_by_tensor(self, kind: Any, tensor: Any, **rest: Any) -> None:
        need(0 <= rank(tensor) <= len(self.labels), "a mask or bias has more dimensions than its scores")
        self.edits.append(self.edit_of(kind, tensor, **rest))

    def edit_of(self, kind: Any, tensor: Any, **rest: Any) -> Edit:
        order = tuple(self.labels.index(label) for label in [*self.batch, self.row, self.column])
        return Edit(kind, tensor, level=len(self.levels) - 1, order=order, **rest)


def check_between(first: Node, last: Node, chain: Sequence[Node]) -> None:
    """The fused call stands where the last product stood: nothing it reads, or runs under, may change before."""
    own, node = {first}, first
    while node is not last:
        is_switch = any(switch in op_name(node) for switch in _SWITCHES)
        need(not is_switch, "gradients or autocast are switched on or off between its two products")
        is_own = all(target in own for target in written_by(node))
        need(is_own, f"`{node.target}` writes to a tensor between its two products")
        # Scores and weights are its own to write to, as is what was computed on the way and is no view.
        if node in chain or (op_name(node) not in VIEWS and not written_by(node)):
            own.add(node)
        node = node.next
    need(not written_by(last), "its result is written into a tensor that is there already")
