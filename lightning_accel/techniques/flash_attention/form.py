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
    """One thing done to the scores (B, H, T, S) before the softmax: in a graph by a node, at a call by its value."""

    # By a number, or a tensor that is the same for all keys; adding a tensor; keeping the keys where a boolean tensor
    # is True, or hiding those; keeping a band of keys; casting to a dtype.
    kind: Literal["multiply", "divide", "add", "keep", "hide", "band", "cast"]
    by: Any
    fill: float = -math.inf  # what hidden keys are given, or a number that comes to the same
    is_added: bool = False  # to their scores, instead of in their place
    factor: float = 1.0  # what an added tensor is multiplied by before
    has_empty_rows: bool = True  # whether a query may be left without a key
    level: int = 0  # in a graph, which of the batch shapes of the form the tensor broadcasts to
    order: tuple[int, ...] = ()  # and where in it, once it has all dimensions, each of (batch…, T, S) stands

    def __str__(self) -> str:
        by = (
            f"`{self.by}`" if isinstance(self.by, Node) else f"{self.by:.4g}" if isinstance(self.by, float) else self.by
        )
        verb = {"multiply": "times", "divide": "divided by", "add": "plus", "cast": "cast to"}.get(self.kind)
        return f"{verb} {by}" if verb else f"{self.fill:g} where {by} is {self.kind == 'hide'}"


@dataclass(frozen=True)
class AttentionForm:
    """One attention in a graph: softmax(edits(query @ key^T)) @ value."""

    # A node, and where in it each of (batch…, T or S, D) stands, None for one that it lacks.
    query: tuple[Node, Order]
    key: tuple[Node, Order]
    value: tuple[Node, Order]
    # The batch shapes that scores and weights go through, as sizes (numbers, nodes, -1). The first is empty: it follows
    # from queries and keys. The last is that of the values.
    levels: tuple[Sequence[Any], ...]
    edits: tuple[Edit, ...]
    out_order: tuple[int, ...]  # where in the result each of (batch…, T, Dv) stands
    dropout_p: Any  # a number, or the node that gives it; zero outside of training
    zero_rows: bool  # whether a query whose keys are all given -inf gets zeros, instead of NaN
    chain: tuple[Node, ...]  # the nodes that go when it is fused; the last is the second product

    @property
    def last(self) -> Node:
        return self.chain[-1]

    def __str__(self) -> str:
        dropout = [f"dropout {self.dropout_p}"] if self.dropout_p != 0 else []
        return " → ".join(["query @ key", *map(str, self.edits), "softmax", *dropout, "@ value"])


@dataclass(frozen=True)
class AttentionFinding:
    """A softmax in a graph: the attention around it, or the first thing that is not as in attention."""

    softmax: Node
    form: AttentionForm | None = None
    reason: str = ""  # why it is not attention

    def __str__(self) -> str:
        found = re.findall(r'File "(.*)", line (\d+).*\n(.*)', self.softmax.stack_trace or "")
        place = f"{found[-1][0]}:{found[-1][1]}: `{found[-1][2].strip()}`" if found else f"`{self.softmax}`"
        return f"softmax in {place}\n" + (f"attention: {self.form}" if self.form else f"left alone: {self.reason}")
