"""The one form of an attention: what is matched in a graph, put in its place, and shown by ``explain``."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch.fx import Node

Band = tuple[int | None, int | None]
Order = tuple[int | None, ...]


@dataclass(frozen=True)
class Edit:
    """One thing done to the scores (B, H, T, S) before the softmax.

    Attributes:
        kind: ``"multiply"``, ``"divide"`` by a number, or by a tensor that is the same for all keys; ``"add"`` a
            tensor; ``"keep"`` the keys where a boolean tensor is True, or ``"hide"`` those; keep a ``"band"`` of keys;
            ``"cast"`` to a dtype.
        by: That number, tensor, band or dtype; in a graph the node that gives it.
        fill: What hidden keys are given: ``-inf``, or a number that comes to the same.
        factor: What an added tensor is multiplied by before.
        has_empty_rows: Whether a query may be left without a key.
        level: In a graph, which of the batch shapes of :class:`Form` the tensor broadcasts to.
        order: And where in it, once it has all dimensions, each of (batch…, T, S) stands.
    """

    kind: Literal["multiply", "divide", "add", "keep", "hide", "band", "cast"]
    by: Any
    fill: float = -math.inf
    factor: float = 1.0
    has_empty_rows: bool = True
    level: int = 0
    order: tuple[int, ...] = ()

    def __str__(self) -> str:
        by = (
            f"`{self.by}`" if isinstance(self.by, Node) else f"{self.by:.4g}" if isinstance(self.by, float) else self.by
        )
        verb = {"multiply": "times", "divide": "divided by", "add": "plus", "cast": "cast to"}.get(self.kind)
        return f"{verb} {by}" if verb else f"{self.fill:g} where {by} is {self.kind == 'hide'}"


@dataclass(frozen=True)
class Form:
    """One attention in a graph: softmax(edits(query @ key^T)) @ value.

    Attributes:
        query, key, value: The node, and where in it each of (batch…, T or S, D) stands, None for one that it lacks.
        levels: The batch shapes that scores and weights go through, as sizes (numbers, nodes, -1). The first is empty:
            it follows from queries and keys. The last is that of the values.
        edits: What is done to the scores.
        out_order: Where in the result each of (batch…, T, Dv) stands.
        dropout_p: A number, or the node that gives it; zero outside of training.
        zero_rows: Whether a query whose keys are all given -inf gets zeros, instead of NaN.
        chain: The nodes that go when it is fused; the last is the second product.
    """

    query: tuple[Node, Order]
    key: tuple[Node, Order]
    value: tuple[Node, Order]
    levels: tuple[Sequence[Any], ...]
    edits: tuple[Edit, ...]
    out_order: tuple[int, ...]
    dropout_p: Any
    zero_rows: bool
    chain: tuple[Node, ...]

    @property
    def last(self) -> Node:
        return self.chain[-1]

    def __str__(self) -> str:
        dropout = [f"dropout {self.dropout_p}"] if self.dropout_p != 0 else []
        return " → ".join(["query @ key", *map(str, self.edits), "softmax", *dropout, "@ value"])


@dataclass(frozen=True)
class Finding:
    """A softmax in a graph: the attention around it, or the first thing that is not as in attention.

    Attributes:
        softmax: Its node.
        form: None if it is not attention.
        reason: Why.
    """

    softmax: Node
    form: Form | None = None
    reason: str = ""

    def __str__(self) -> str:
        found = re.findall(r'File "(.*)", line (\d+).*\n(.*)', self.softmax.stack_trace or "")
        place = f"{found[-1][0]}:{found[-1][1]}: `{found[-1][2].strip()}`" if found else f"`{self.softmax}`"
        return f"softmax in {place}\n" + (f"attention: {self.form}" if self.form else f"left alone: {self.reason}")
