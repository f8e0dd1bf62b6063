"""Recognises attention in a captured graph: product → scale, mask, bias → softmax → dropout → product, in any spelling.

Every dimension carries a label from the first product on, so that it does not matter whether heads stand before or
after positions, are folded into the batch, or are not there at all.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from lightning_accel.techniques.flash_attention.graph_ops import (
    Labels,
    Product,
    argument,
    equal_sizes,
    is_in_place,
    is_tensor,
    op_name,
    permuted,
    rank,
    read_product,
    same_shape,
    sizes_of_view,
    value,
)
from lightning_accel.techniques.flash_attention.masks import HIDES_BELOW
from lightning_accel.techniques.flash_attention.surroundings import (
    NotAttentionError,
    check_between,
    constant,
    row_maximum,
    same_batch,
)

Order = tuple[int | None, ...]


@dataclass(frozen=True)
class Step:
    """One thing that is done to the scores between the first product and the softmax.

    Attributes:
        kind: ``"scale"`` by a number; ``"factor"``: by a tensor that is the same for all keys; ``"bias"``: adds a
            tensor; ``"keep"``, ``"hide"``: a boolean tensor says which keys take part, or do not.
        arg: The number, or the node that gives it, or the tensor.
        power: 1, or -1 where a scale or factor divides, or a bias is subtracted.
        level: Index of the batch shape that the tensor broadcasts to.
        order: Where in the tensor, after it got all dimensions, each of (batch…, T, S) stands.
        fill: What hidden keys are given: ``-inf``, or a number that comes to the same.
    """

    kind: Literal["scale", "factor", "bias", "keep", "hide"]
    arg: Any
    power: float = 1
    level: int = 0
    order: tuple[int, ...] = ()
    fill: float = -math.inf


@dataclass
class Match:
    """One attention in a graph, and how to bring its parts into the form (batch…, T, D).

    Attributes:
        query: The node of the queries; ``query_order`` says where (batch…, T, D) stand in it, None for a missing one.
        levels: The batch shapes that the scores and weights go through, as sizes (numbers, nodes, -1); the first,
            which follows from the operands, is empty.
        steps: From the first product to the softmax.
        weights_level: The batch shape that the weights have in the second product.
        out_order: Where in the result each of (batch…, T, Dv) stands.
        dropout_p: Zero outside of training.
        last: The second product.
        chain: Everything that the fused call replaces, in graph order.
        constants: What was computed from the chain alone and goes with it, if nothing else uses it.
    """

    query: Node
    query_order: Order
    key: Node
    key_order: Order
    levels: list[Sequence[Any]]
    steps: list[Step]
    value: Node
    value_order: Order
    weights_level: int
    out_order: tuple[int, ...]
    dropout_p: float
    last: Node
    chain: list[Node] = field(default_factory=list)
    constants: set[Node] = field(default_factory=set)


def find_attention(graph: Graph) -> Iterator[Match | str]:
    """Every attention in ``graph``, or, for what is nearly one, why it is left alone."""
    for node in list(graph.nodes):
        if op_name(node) == "softmax" and is_tensor(node):
            path = _path_from_product(argument(node, 0, "input"), depth=24)
            if path is None:
                continue
            try:
                yield _Reader(path, node).read()
            except NotAttentionError as reason:
                yield str(reason)


def _path_from_product(node: Any, depth: int) -> list[Node] | None:
    """The nodes from a matrix product to ``node`` along which the scores go; None if there is no such way."""
    if not is_tensor(node) or depth == 0:
        return None
    if read_product(node) is not None:
        return [node]
    name = op_name(node)
    if name.endswith("_like"):
        return None  # has only the shape of the scores
    sources: tuple[Any, ...]
    if name in ("add", "mul"):
        sources = (argument(node, 0, "input"), argument(node, 1, "other"))
    elif name == "where" and node.op == "call_function":
        sources = node.args[1:3]
    else:
        # Of an operation that is not understood, too: what it is called goes into the reason.
        sources = node.args[:1]
    for source in sources:
        if rank(source) >= 2:
            path = _path_from_product(source, depth - 1)
            if path is not None:
                return [*path, node]
    return None


class _Reader:
    """Follows the scores from the first product to the second."""

    def __init__(self, path: list[Node], softmax: Node) -> None:
        self._path = path
        self._softmax = softmax
        self._steps: list[Step] = []
        self._levels: list[Sequence[Any]] = [()]
        self._batch: list[list[Hashable]] = []  # the batch labels of each level
        self._chain: list[Node] = []
        self._constants: set[Node] = set()

    def read(self) -> Match:
        first = read_product(self._path[0])
        assert first is not None
        row, column = self._row_and_column(first)
        labels = first.out
        self._batch.append([label for label in labels if label not in (row, column)])
        self._chain.append(self._path[0])
        if is_in_place(self._path[0]):
            raise NotAttentionError("its first product is written into a tensor that is there already")
        if op_name(self._path[0]) == "baddbmm":
            self._read_baddbmm(self._path[0], labels, row, column)
        for before, node in zip(self._path, self._path[1:], strict=False):
            labels = self._step(node, before, labels, row, column)
            self._only_user(before, node)
            self._chain.append(node)
        self._only_user(self._path[-1], self._softmax)
        self._chain.append(self._softmax)
        dropout_p, weights, labels = self._after_softmax(labels, row, column)
        last = next(iter(weights.users))
        second = read_product(last)
        if second is None or op_name(last) == "baddbmm":
            raise NotAttentionError("the second product is more than one of weights and values")
        sides = [side for side, operand in enumerate(second.operands) if operand is weights]
        if len(sides) != 1:
            raise NotAttentionError("its weights are multiplied by themselves")
        side = sides[0]
        renamed = dict(zip(second.labels[side], labels, strict=True))
        if renamed.get(second.contracted) != column:
            raise NotAttentionError("the second product does not sum over the keys")
        others = [renamed.get(label, ("second", label)) for label in second.labels[1 - side]]
        out = [renamed.get(label, ("second", label)) for label in second.out]
        batch = self._batch[-1]
        extra = [label for label in others if label not in batch and label != column]
        if len(extra) != 1 or row not in out or row in others or any(label not in out for label in (*batch, extra[0])):
            raise NotAttentionError("the second product is not one of weights and values")
        if self._levels[1:] and not same_batch(weights, second, side):
            raise NotAttentionError("its values have other batches than its weights")
        left, right = first.operands
        query, key = (0, 1) if row in first.labels[0] else (1, 0)
        check_between(self._path[0], last, self._chain)
        return Match(
            query=(left, right)[query],
            query_order=_order(first.labels[query], [*self._batch[0], row, first.contracted]),
            key=(left, right)[key],
            key_order=_order(first.labels[key], [*self._batch[0], column, first.contracted]),
            levels=self._levels,
            steps=self._steps,
            value=second.operands[1 - side],
            value_order=_order(others, [*batch, column, extra[0]]),
            weights_level=len(self._levels) - 1,
            out_order=tuple([*batch, row, extra[0]].index(label) for label in out),
            dropout_p=dropout_p,
            last=last,
            chain=self._chain,
            constants=self._constants,
        )

    def _row_and_column(self, first: Product) -> tuple[Hashable, Hashable]:
        """The labels of queries and keys: the softmax runs over the keys."""
        labels = first.out
        for node in self._path[1:]:
            labels = permuted(node, labels) or labels
        dim = argument(self._softmax, 1, "dim")
        if not isinstance(dim, int) or rank(self._softmax) < 2:
            raise NotAttentionError("its softmax names no dimension")
        dims = rank(self._softmax)
        # A reshape in between leaves the last two dimensions where they are, and those are counted from the end.
        column = labels[dim % dims - dims] if dims - dim % dims <= len(labels) else None
        left, right = ([label for label in side if label != first.contracted] for side in first.labels)
        owner, other = (right, left) if column in right and column not in left else (left, right)
        rows = [label for label in other if label not in owner]
        if column is None or column not in owner or column in other or not rows:
            raise NotAttentionError("its softmax runs over another dimension than the keys")
        return rows[-1], column

    def _only_user(self, node: Node, user: Node) -> None:
        # What only asks for the shape to build a constant goes away with it.
        others = [other for other in node.users if other is not user and other not in self._constants]
        if not others:
            return
        what = "scores" if node in self._path else "weights"
        after = "returned or stored" if any(other.op == "output" for other in others) else "used elsewhere"
        raise NotAttentionError(f"its {what} are {after}")

    def _step(self, node: Node, before: Node, labels: Labels, row: Hashable, column: Hashable) -> Labels:
        """What one node does to the scores; returns the labels after it."""
        name = op_name(node)
        moved = permuted(node, labels)
        if moved is not None:
            return moved
        if name == "view" or (name in ("unsqueeze", "squeeze", "flatten", "unflatten") and node.args[0] is before):
            return self._regrouped(node, before, labels, row, column)
        if name == "neg":
            self._check_scale(-1, 1)
            self._steps.append(Step("scale", -1))
            return labels
        if name in ("same", "to") and node.args[0] is before:
            if not value(node).is_floating_point():
                raise NotAttentionError(f"its scores are cast to {value(node).dtype}")
            return labels
        if rank(node) != rank(before) or not same_shape(node, before):
            raise NotAttentionError(f"`{name or node.target}` changes the shape of its scores")
        maximum = row_maximum(argument(node, 1, "other"), before, labels, column) if name == "sub" else None
        if maximum is not None:
            self._constants |= maximum
            return labels  # one number for all keys of a query: no weight changes
        if name in ("add", "sub", "mul", "div"):
            self._arithmetic(name, node, before, labels, row, column)
        elif name in ("masked_fill", "where"):
            self._masking(name, node, before, labels, row, column)
        else:
            raise NotAttentionError(f"`{name or node.target}` stands between its first product and the softmax")
        return labels

    def _arithmetic(self, name: str, node: Node, before: Node, labels: Labels, row: Hashable, column: Hashable) -> None:
        left, right = argument(node, 0, "input"), argument(node, 1, "other")
        if is_in_place(node) and left is not before:
            raise NotAttentionError("its scores are added to a tensor that is there already")
        if left is right or node.kwargs.get("rounding_mode") is not None or node.kwargs.get("out") is not None:
            raise NotAttentionError(f"`{name}` between its first product and the softmax is not understood")
        if right is before and name in ("sub", "div"):
            raise NotAttentionError("its scores are subtracted from something, or divide it")
        other = right if left is before else left
        alpha = node.kwargs.get("alpha", 1)
        if not isinstance(alpha, int | float) or (alpha != 1 and left is not before):
            raise NotAttentionError("the alpha of an addition is not understood")
        if name in ("mul", "div"):
            power = 1 if name == "mul" else -1
            if not is_tensor(other):
                self._check_scale(other, power)
                self._steps.append(Step("scale", other, power))
            elif rank(other) == 0 or self._is_same_for_all_keys(other, labels, column):
                if any(step.kind in ("keep", "hide", "bias") for step in self._steps):
                    raise NotAttentionError("its scores are scaled by a tensor after they were masked")
                if len(self._levels) > 1 and rank(other) > 0:
                    raise NotAttentionError("its scores are scaled by a tensor after they were reshaped")
                self._steps.append(self._tensor_step("factor", other, labels, row, column, power=power))
            else:
                raise NotAttentionError("its scores are multiplied by something that differs from key to key")
        elif is_tensor(other):
            if name == "sub" and value(other).dtype == torch.bool:
                raise NotAttentionError("booleans are subtracted from its scores")
            factor = alpha if name == "add" else -alpha
            self._steps.append(self._tensor_step("bias", other, labels, row, column, power=factor))
        # A number added to every score changes no weight.

    def _check_scale(self, scale: Any, power: float) -> None:
        is_number = isinstance(scale, int | float)
        if is_number and scale == 0:
            raise NotAttentionError("its scores are scaled by zero")
        fills = [step.fill for step in self._steps if step.kind in ("keep", "hide")]
        if fills and not (is_number and scale > 0 and max(fills) * scale**power <= HIDES_BELOW):
            raise NotAttentionError("its scores are scaled after they were masked")

    def _masking(self, name: str, node: Node, before: Node, labels: Labels, row: Hashable, column: Hashable) -> None:
        if name == "masked_fill":
            mask, fill, kind = argument(node, 1, "mask"), argument(node, 2, "value"), "hide"
        elif node.op == "call_method":
            mask, fill, kind = argument(node, 1, "condition"), argument(node, 2, "other"), "keep"
        else:
            mask, kept, dropped = node.args[:3]
            fill, kind = (dropped, "keep") if kept is before else (kept, "hide")
        number = constant(fill, self._constants)
        if number is None:
            raise NotAttentionError("masked scores are filled with something that is not a constant")
        if number < torch.finfo(value(node).dtype).min:
            number = -math.inf  # in float16, -1e9 is
        if not number <= HIDES_BELOW:
            raise NotAttentionError(f"masked scores are filled with {number:g}, which leaves them a weight")
        step = self._tensor_step("keep" if kind == "keep" else "hide", mask, labels, row, column, fill=number)
        self._steps.append(step)

    def _tensor_step(
        self, kind: Any, tensor: Any, labels: Labels, row: Hashable, column: Hashable, **rest: Any
    ) -> Step:
        if rank(tensor) > len(labels) or rank(tensor) < 0:
            raise NotAttentionError("a mask or bias has more dimensions than its scores")
        order = tuple(labels.index(label) for label in [*self._batch[-1], row, column])
        return Step(kind, tensor, level=len(self._levels) - 1, order=order, **rest)

    def _read_baddbmm(self, node: Node, labels: Labels, row: Hashable, column: Hashable) -> None:
        self._steps.append(Step("scale", node.kwargs.get("alpha", 1)))
        beta = node.kwargs.get("beta", 1)
        if beta != 0:
            if not isinstance(beta, int | float):
                raise NotAttentionError("the beta of its baddbmm is not a number")
            bias = argument(node, 0, "input")
            self._steps.append(self._tensor_step("bias", bias, labels, row, column, power=beta))

    def _is_same_for_all_keys(self, tensor: Node, labels: Labels, column: Hashable) -> bool:
        from_end = len(labels) - labels.index(column)
        return rank(tensor) < from_end or statically_known_true(value(tensor).shape[-from_end] == 1)

    def _regrouped(self, node: Node, before: Node, labels: Labels, row: Hashable, column: Hashable) -> Labels:
        """A reshape may fold and unfold batch dimensions; queries and keys must stay the last two."""
        shape, old = value(node).shape, value(before).shape
        moved = list(labels[:-2]) != self._batch[-1] or set(labels[-2:]) != {row, column}
        if moved or len(shape) < 2 or not equal_sizes(shape[-2:], old[-2:]):
            raise NotAttentionError("its scores or weights are reshaped across queries and keys")
        sizes: Sequence[Any] = shape[:-2]
        if sum(not isinstance(size, int) for size in sizes) > 1:
            sizes = sizes_of_view(node)[:-2] if op_name(node) == "view" else ()
            if len(sizes) != len(shape) - 2 or not all(isinstance(size, int | Node) for size in sizes):
                raise NotAttentionError("its scores or weights are reshaped in a way that is not understood")
        else:
            sizes = [size if isinstance(size, int) else -1 for size in sizes]
        self._levels.append(sizes)
        self._batch.append([("level", len(self._levels), index) for index in range(len(sizes))])
        return (*self._batch[-1], *labels[-2:])

    def _after_softmax(self, labels: Labels, row: Hashable, column: Hashable) -> tuple[float, Node, Labels]:
        node, dropout_p = self._softmax, 0.0
        while True:
            if len(node.users) != 1:
                self._only_user(node, next(iter(node.users), node))
                raise NotAttentionError("its weights are not used")
            user = next(iter(node.users))
            if user.op == "output":
                raise NotAttentionError("its weights are returned or stored")
            if read_product(user) is not None:
                return dropout_p, node, labels
            name = op_name(user)
            moved = permuted(user, labels)
            if moved is not None:
                labels = moved
            elif name in ("view", "unsqueeze", "squeeze", "flatten", "unflatten"):
                labels = self._regrouped(user, node, labels, row, column)
            elif name == "dropout":
                p = argument(user, 1, "p", 0.5)
                is_training = argument(user, 2, "training", argument(user, 2, "train", True))
                if not isinstance(p, int | float) or not isinstance(is_training, bool) or (dropout_p and is_training):
                    raise NotAttentionError("the dropout of its weights is not understood")
                dropout_p = max(dropout_p, float(p) if is_training else 0.0)
            elif name not in ("same", "to") or user.args[0] is not node or not value(user).is_floating_point():
                raise NotAttentionError(
                    f"`{name or user.target}` stands between the softmax and the product with the values"
                )
            self._chain.append(user)
            node = user


def _order(labels: Sequence[Hashable], wanted: Sequence[Hashable]) -> Order:
    return tuple(labels.index(label) if label in labels else None for label in wanted)
