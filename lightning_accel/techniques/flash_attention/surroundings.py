"""What stands around attention in a graph: constants that it is given, and what happens between its two products."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from lightning_accel.techniques.flash_attention.graph_ops import (
    VIEWS,
    Labels,
    Product,
    argument,
    op_name,
    value,
    written_by,
)

_REGIONS = frozenset(
    (
        *("_set_grad_enabled", "set_grad_enabled", "_enter_autocast", "_exit_autocast", "enter_autocast"),
        *("exit_autocast", "_enter_inference_mode", "_exit_inference_mode"),
    )
)


class NotAttentionError(Exception):
    """Why something that looked like attention is left alone; the text goes into the report."""


def constant(node: Any, seen: set[Node], depth: int = 8) -> float | None:
    """The number that a node holds everywhere, if it was built from nothing but numbers.

    Args:
        node: A node, or a number.
        seen: Takes the nodes that such a number was built from.
        depth: How far back to go.
    """
    if isinstance(node, int | float):
        return float(node)
    if not isinstance(node, Node) or depth == 0:
        return None
    name = op_name(node)
    found: float | None = None
    if name in ("full", "full_like", "new_full"):
        found = constant(argument(node, 2 if name == "new_full" else 1, "fill_value"), seen, depth - 1)
    elif name in ("tensor", "scalar_tensor", "new_tensor"):
        found = constant(argument(node, 1 if name == "new_tensor" else 0, "data"), seen, depth - 1)
    elif name in ("ones_like", "zeros_like", "ones", "zeros"):
        found = float(name.startswith("ones"))
    elif name in ("to", "neg", "expand_as", "expand"):
        inner = constant(node.args[0], seen, depth - 1)
        found = inner if inner is None or name != "neg" else -inner
    elif name in ("mul", "add", "sub"):
        left, right = (constant(side, seen, depth - 1) for side in node.args[:2])
        if left is not None and right is not None:
            found = {"mul": left * right, "add": left + right, "sub": left - right}[name]
    if found is not None:
        seen.add(node)
    return found


def row_maximum(other: Any, scores: Node, labels: Labels, column: Hashable) -> set[Node] | None:
    """The nodes that take each query's highest score, if that is what ``other`` is; else None."""
    steps: list[Node] = []
    while isinstance(other, Node) and op_name(other) in ("getitem", "detach"):
        steps.append(other)
        other = other.args[0]
    if not isinstance(other, Node) or op_name(other) not in ("amax", "max") or other.args[0] is not scores:
        return None
    dim, keepdim = argument(other, 1, "dim"), argument(other, 2, "keepdim", False)
    dim = dim[0] if isinstance(dim, list | tuple) and len(dim) == 1 else dim
    takes_values = op_name(other) == "amax" or any(step.args[1:] == (0,) for step in steps)
    if not (isinstance(dim, int) and keepdim and takes_values and labels[dim] == column):
        return None
    return {other, *steps} if all(len(step.users) == 1 for step in steps) else None


def check_between(first: Node, last: Node, chain: Sequence[Node]) -> None:
    """The fused call stands where the last product stood: nothing it reads, or runs under, may change before.

    Raises:
        NotAttentionError: Something does.
    """
    own: set[Any] = {first}
    node = first
    while node is not last:
        if op_name(node) in _REGIONS:
            raise NotAttentionError("gradients or autocast are switched on or off between its two products")
        if any(target not in own for target in written_by(node)):
            raise NotAttentionError(f"`{node.target}` writes to a tensor between its two products")
        # Scores and weights are its own to write to, as is what was computed on the way and is no view.
        if node in chain or (op_name(node) not in VIEWS and not written_by(node)):
            own.add(node)
        node = node.next
    if written_by(last):
        raise NotAttentionError("its result is written into a tensor that is there already")


def same_batch(weights: Node, second: Product, side: int) -> bool:
    """Whether the values' batch dimensions are known to be those of the weights, or one for all."""
    sizes = dict(zip(second.labels[side], value(weights).shape, strict=True))
    values = zip(second.labels[1 - side], value(second.operands[1 - side]).shape, strict=True)
    return all(
        statically_known_true(size == 1) or statically_known_true(size == sizes[label])
        for label, size in values
        if label in sizes and label != second.contracted
    )
