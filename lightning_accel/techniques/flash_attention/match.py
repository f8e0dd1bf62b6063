"""Recognises attention in a captured graph: product → scale, mask, bias → softmax → dropout → product, in any spelling.

Every dimension carries a label from the first product on, so that it does not matter whether heads stand before or
after positions, are folded into the batch, or are not there at all.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from lightning_accel.techniques.flash_attention.call import AttentionFinding, AttentionForm, Edit, Order
from lightning_accel.techniques.flash_attention.graph import (
    Labels,
    NotAttentionError,
    Softmax,
    argument,
    check_between,
    constant,
    equal_sizes,
    is_in_place,
    is_tensor,
    need,
    op_name,
    permuted,
    rank,
    read_product,
    read_softmax,
    sizes_of_view,
    value,
    written_by,
)
from lightning_accel.techniques.flash_attention.masks import HIDES_BELOW

_DEPTH = 24  # operations between the first product and the softmax
_RESHAPES = ("view", "unsqueeze", "squeeze", "flatten", "unflatten")


def find_attention(graph: Graph) -> Iterator[AttentionFinding]:
    """What there is around every softmax of ``graph``, one at a time: the graph may be edited in between."""
    for node in list(graph.nodes):
        softmax = read_softmax(node)
        if softmax is None:
            continue
        path = _path_from_product(softmax.scores, _DEPTH)
        try:
            need(bool(path), "no matrix product leads to its softmax")
            yield AttentionFinding(node, _Reader(path, softmax).read())
        except NotAttentionError as reason:
            yield AttentionFinding(node, reason=str(reason))


def _path_from_product(node: Any, depth: int) -> list[Node]:
    """The nodes from a matrix product to ``node`` along which the scores go; empty if there is no such way."""
    if not is_tensor(node) or depth == 0:
        return []
    if read_product(node) is not None:
        return [node]
    name = op_name(node)
    sources: Sequence[Any] = node.args[:1]  # also of what is not understood: its name goes into the reason
    if name in ("add", "mul"):
        sources = argument(node, 0, "input"), argument(node, 1, "other")
    elif name == "where" and node.op == "call_function":
        sources = node.args[1:3]
    elif name.endswith("_like"):  # has only the shape of the scores
        sources = ()
    paths = (_path_from_product(source, depth - 1) for source in sources if rank(source) >= 2)
    return next(([*path, node] for path in paths if path), [])


class _Reader:
    """Follows the scores from the first product to the softmax, and the weights from there to the second.

    Dimensions go by their labels, which stay with them when they are moved.
    """

    def __init__(self, path: list[Node], softmax: Softmax) -> None:
        product = read_product(path[0])
        assert product is not None
        self.path, self.softmax, self.first = path, softmax, product
        self.row, self.column = self._row_and_column()
        self.labels: Labels = product.out  # of the dimensions at the node that was read last
        self.batch = [label for label in product.out if label not in (self.row, self.column)]  # after a reshape, new
        self.levels: list[Sequence[Any]] = [()]
        self.edits: list[Edit] = []
        self.dropout_p: Any = 0.0
        self.zero_rows = softmax.is_safe
        self.spare: set[Node] = set()  # what was computed from the chain alone, and goes with it
        self.shifts: set[Node] = set()  # of those, what was subtracted from the scores

    def _row_and_column(self) -> tuple[Hashable, Hashable]:
        """The labels of queries and keys: the softmax runs over the keys."""
        labels = self.first.out
        for node in self.path[1:]:
            labels = permuted(node, labels) or labels
        dim, dims = self.softmax.dim, rank(self.softmax.scores)
        need(isinstance(dim, int), "its softmax names no dimension")
        # A reshape in between leaves the last two dimensions where they are, and those are counted from the end.
        from_end = dims - dim % dims
        column = labels[-from_end] if from_end <= len(labels) else None
        left, right = ([label for label in side if label != self.first.contracted] for side in self.first.labels)
        owner, other = (right, left) if column in right and column not in left else (left, right)
        rows = [label for label in other if label not in owner]
        is_of_keys = column in owner and column not in other and bool(rows)
        need(is_of_keys, "its softmax runs over another dimension than the keys")
        return rows[-1], column

    def read(self) -> AttentionForm:
        start, end = self.path[0], self.softmax.nodes[-1]
        query, key = (self._operand(label, [*self.batch, label]) for label in (self.row, self.column))
        need(not is_in_place(start), "its first product is written into a tensor that is there already")
        if op_name(start) == "baddbmm":
            self._read_baddbmm(start)
        for before, node in itertools.pairwise(self.path):
            self._read_score_step(node, before)
        scores = [*self.path, *self.softmax.nodes[:-1], *self.shifts]
        self.spare |= set(scores)
        for node in scores:
            self._check_users(node, "scores")
        weights = [end]
        while read_product(user := self._only_user(weights[-1])) is None:
            self._read_weight_step(user, weights[-1])
            weights.append(user)
        values, out_order = self._read_second_product(user, weights[-1])
        chain = (*self.spare, *weights, user)
        check_between(start, user, chain)
        levels, edits = tuple(self.levels), tuple(self.edits)
        return AttentionForm(query, key, values, levels, edits, out_order, self.dropout_p, self.zero_rows, chain)

    def _operand(self, label: Hashable, wanted: list[Hashable]) -> tuple[Node, Order]:
        side = 0 if label in self.first.labels[0] else 1
        node, labels, wanted = self.first.operands[side], self.first.labels[side], [*wanted, self.first.contracted]
        # Keys are transposed for the product. A kernel takes them as they were before.
        while _order(labels, wanted) != tuple(range(len(wanted))) and (before := _untransposed(node, labels)):
            node, labels = before
        return node, _order(labels, wanted)

    def _check_users(self, node: Node, what: str, *own: Node) -> None:
        for user in node.users:
            if not user.users and is_tensor(user) and op_name(user) and not written_by(user):
                self.spare.add(user)  # nobody reads it
        others = [user for user in node.users if user not in (*self.spare, *own, self.softmax.nodes[-1])]
        is_stored = any(user.op == "output" for user in others)
        need(not others, f"its {what} are {'returned or stored' if is_stored else 'used elsewhere'}")

    def _only_user(self, node: Node) -> Node:
        users = [user for user in node.users if user.users]
        if not users:
            is_stored = any(user.op == "output" for user in node.users)
            raise NotAttentionError(f"its weights are {'returned or stored' if is_stored else 'not used'}")
        self._check_users(node, "weights", users[0])
        return users[0]

    # -- labels ----------------------------------------------------------------------------------------------------

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

    # -- scores ----------------------------------------------------------------------------------------------------

    def _read_baddbmm(self, node: Node) -> None:
        self._scale("multiply", node.kwargs.get("alpha", 1))
        beta = node.kwargs.get("beta", 1)
        need(isinstance(beta, int | float), "the beta of its baddbmm is not a number")
        if beta != 0:
            self.edit_by_tensor("add", argument(node, 0, "input"), factor=beta)

    def _read_score_step(self, node: Node, before: Node) -> None:
        name = op_name(node)
        if self.move(node, before):
            return
        if name == "neg":
            self._scale("multiply", -1)
        elif name in ("same", "to") and node.args[0] is before:
            self._cast(value(node).dtype)
        elif rank(node) != rank(before) or not equal_sizes(value(node).shape, value(before).shape):
            raise NotAttentionError(f"`{name or node.target}` changes the shape of its scores")
        elif name in ("add", "sub"):
            self._read_addition(name, node, before)
        elif name in ("mul", "div"):
            self._read_scale(name, node, before)
        elif name in ("masked_fill", "where"):
            self._read_mask(name, node, before)
        else:
            raise NotAttentionError(f"`{name or node.target}` stands between its first product and the softmax")

    def _other(self, name: str, node: Node, before: Node) -> Any:
        """What the scores are added to or multiplied by."""
        left, right = argument(node, 0, "input"), argument(node, 1, "other")
        is_turned = left is not before and (is_in_place(node) or name in ("sub", "div"))
        is_known = left is not right and all(given in ("input", "other") for given in node.kwargs)
        need(is_known and not is_turned, f"`{name}` between its first product and the softmax is not understood")
        return right if left is before else left

    def _read_addition(self, name: str, node: Node, before: Node) -> None:
        other = self._other(name, node, before)
        if not is_tensor(other):
            return  # a number added to every score changes no weight
        shift = [other]
        while isinstance(shift[-1], Node) and shift[-1] is not before:
            shift.append(argument(shift[-1], 0, "input"))
        if shift[-1] is before and self.is_same_for_all_keys(other):
            self.shifts |= set(shift[:-1])  # nor does a number for each query: the highest of its scores
        else:
            need(name == "add" or value(other).dtype != torch.bool, "booleans are subtracted from its scores")
            self.edit_by_tensor("add", other, factor=1 if name == "add" else -1)

    def _read_scale(self, name: str, node: Node, before: Node) -> None:
        kind, other = "multiply" if name == "mul" else "divide", self._other(name, node, before)
        number = constant(other, self.spare)
        if number is not None or not is_tensor(other):
            self._scale(kind, other if number is None else number)
            return
        need(self.is_same_for_all_keys(other), "its scores are multiplied by something that differs from key to key")
        is_masked = any(edit.kind not in ("multiply", "divide") for edit in self.edits)
        is_late = is_masked or (len(self.levels) > 1 and rank(other) > 0)
        need(not is_late, "its scores are scaled by a tensor after they were masked or reshaped")
        self.edit_by_tensor(kind, other)

    def _scale(self, kind: Any, by: Any) -> None:
        is_number = isinstance(by, int | float)
        need(not is_number or (by != 0 and math.isfinite(by)), f"its scores are scaled by {by}")
        if is_number and kind == "divide":
            kind, by = "multiply", 1 / by
        fills = [edit.fill for edit in self.edits if edit.kind in ("keep", "hide")]
        is_hidden_yet = not fills or (is_number and by > 0 and max(fills) * by <= HIDES_BELOW)
        need(is_hidden_yet, "its scores are scaled after they were masked")
        self.edits.append(Edit(kind, by))

    def _cast(self, dtype: torch.dtype) -> None:
        need(dtype.is_floating_point, f"its scores are cast to {dtype}")
        lowest = torch.finfo(dtype).min
        self.edits = [replace(edit, fill=-math.inf) if edit.fill < lowest else edit for edit in self.edits]
        if dtype == torch.float16 and any(edit.kind == "add" for edit in self.edits):
            self.edits.append(Edit("cast", dtype))  # makes large negative numbers -inf

    def _read_mask(self, name: str, node: Node, before: Node) -> None:
        if name == "masked_fill":
            mask, fill, kind = argument(node, 1, "mask"), argument(node, 2, "value"), "hide"
        elif node.op == "call_method":
            mask, fill, kind = argument(node, 1, "condition"), argument(node, 2, "other"), "keep"
        else:
            mask, kept, dropped = node.args[:3]
            fill, kind = (dropped, "keep") if kept is before else (kept, "hide")
        number = constant(fill, self.spare)
        if number is None:
            raise NotAttentionError("masked scores are filled with something that is not a constant")
        need(number <= HIDES_BELOW, f"masked scores are filled with {number:g}, which leaves them a weight")
        lowest = torch.finfo(value(node).dtype).min  # below which is -inf: -1e9 in float16
        self.edit_by_tensor(kind, mask, fill=-math.inf if number < lowest else number)

    # -- weights ---------------------------------------------------------------------------------------------------

    def _read_weight_step(self, node: Node, before: Node) -> None:
        name = op_name(node)
        if self.move(node, before):
            return
        if name == "dropout":
            p = argument(node, 1, "p", 0.5)
            is_training = argument(node, 2, "training", argument(node, 2, "train", True))
            is_known = isinstance(is_training, bool) and not (self.dropout_p and is_training)
            need(is_known, "the dropout of its weights is not understood")
            self.dropout_p = p if is_training else self.dropout_p
        elif name == "masked_fill" and self._is_hidden_already(node):
            self.zero_rows = True
            self.edits = [replace(edit, fill=-math.inf) if edit.kind == "hide" else edit for edit in self.edits]
        else:
            is_cast = name in ("same", "to") and node.args[0] is before and value(node).is_floating_point()
            need(is_cast, f"`{name or node.target}` stands between the softmax and the product with the values")

    def _is_hidden_already(self, node: Node) -> bool:
        """Whether weights are set to zero where the only mask of the scores has hidden them."""
        masks = [replace(edit, fill=0.0) for edit in self.edits if edit.kind in ("add", "keep", "hide")]
        again = self.edit_of("hide", argument(node, 1, "mask"), fill=0.0)
        return masks == [again] and argument(node, 2, "value") == 0

    def _read_second_product(self, last: Node, weights: Node) -> tuple[tuple[Node, Order], tuple[int, ...]]:
        second = read_product(last)
        assert second is not None
        need(op_name(last) != "baddbmm", "the second product is more than one of weights and values")
        side = second.operands.index(weights)
        need(second.operands[1 - side] is not weights, "its weights are multiplied by themselves")
        renamed = dict(zip(second.labels[side], self.labels, strict=True))
        need(renamed.get(second.contracted) == self.column, "the second product does not sum over the keys")
        others = [renamed.get(label, ("second", label)) for label in second.labels[1 - side]]
        out = [renamed.get(label, ("second", label)) for label in second.out]
        extra = [label for label in others if label not in (*self.batch, self.column)]
        is_plain = len(extra) == 1 and set(out) == {*self.batch, self.row, *extra} and self.row not in others
        need(is_plain, "the second product is not one of weights and values")
        # After a reshape the values' batch dimensions have to be known to be those of the weights, or one for all.
        sizes = dict(zip(self.labels, value(weights).shape, strict=True))
        is_same = len(self.levels) == 1 or all(
            statically_known_true(size == 1) or statically_known_true(size == sizes[label])
            for label, size in zip(others, value(second.operands[1 - side]).shape, strict=True)
            if label in self.batch
        )
        need(is_same, "its values have other batches than its weights")
        operand = second.operands[1 - side], _order(others, [*self.batch, self.column, *extra])
        return operand, tuple([*self.batch, self.row, *extra].index(label) for label in out)


def _untransposed(node: Node, labels: Labels) -> tuple[Node, Labels] | None:
    """What a node transposes, with the labels of its dimensions; None if it does something else."""
    source, moved = argument(node, 0, "input"), permuted(node, tuple(range(len(labels))))
    if moved is None or not is_tensor(source) or value(source).is_complex():  # mH conjugates
        return None
    if any(source in written_by(user) for user in source.users):  # transpose_ moves the dimensions of the source
        return None
    return source, tuple(labels[moved.index(index)] for index in range(len(labels)))


def _order(labels: Sequence[Hashable], wanted: Sequence[Hashable]) -> Order:
    return tuple(labels.index(label) if label in labels else None for label in wanted)
