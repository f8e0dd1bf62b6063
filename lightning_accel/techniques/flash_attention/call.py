"""One attention, however it was written: as a call, which every backend takes, and as it is found in a graph."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.fx import Node
from torch.nn import functional as F

Band = tuple[int | None, int | None]
Order = tuple[int | None, ...]


@dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """The arguments of one attention, all of one dtype: softmax(scale * query @ key^T + mask) @ value."""

    query: Tensor  # (B, H, T, D)
    key: Tensor  # (B, H, S, D)
    value: Tensor  # (B, H, S, Dv)
    mask: Tensor | None = None  # broadcastable to (B, H, T, S), 4-D: bool (True takes part) or floating (added)
    is_causal: bool = False  # query i sees keys 0 … i (aligned at the top left) and of those what the mask allows
    dropout_p: float = 0.0  # probability with which a weight is dropped
    scale: float | None = None  # None: 1/sqrt(D)
    window: tuple[int, int] | None = None  # keys to the left and right of its own position that a query sees; None: all

    @property
    def true_scale(self) -> float:
        """The scale as a number."""
        return 1 / math.sqrt(self.query.shape[-1]) if self.scale is None else self.scale

    @property
    def key_padding(self) -> Tensor | None:
        """The mask as (B, S) booleans, True for real keys, if it hides keys from all queries alike; else None."""
        mask = self.mask
        if mask is None or mask.dtype != torch.bool or mask.shape[1] != 1 or mask.shape[2] != 1:
            return None
        return mask[:, 0, 0].expand(self.query.shape[0], self.key.shape[2])

    def band(self, left: int | None, right: int | None) -> Tensor:
        """(1, 1, T, S) booleans: so many keys to the left and to the right of a query's position, None for all."""
        keep = torch.ones(1, 1, self.query.shape[2], self.key.shape[2], dtype=torch.bool, device=self.query.device)
        keep = keep if right is None else keep.tril(right)
        return keep if left is None else keep.triu(-left)

    def with_dense_mask(self) -> AttentionCall:
        """The same call with causality and window folded into the mask, where there is a mask already or a window."""
        if self.window is None and (self.mask is None or not self.is_causal):
            return self
        left, right = self.window or (None, None)
        seen = self.band(left, 0 if self.is_causal else right)
        if self.mask is None:
            mask = seen
        elif self.mask.dtype == torch.bool:
            mask = self.mask & seen
        else:
            mask = self.mask.masked_fill(~seen, -math.inf)
        return replace(self, mask=mask, is_causal=False, window=None)


def sdpa(call: AttentionCall) -> Tensor:
    """The call through torch's ``scaled_dot_product_attention``, which chooses the kernel: (B, H, T, Dv)."""
    call = call.with_dense_mask()
    q, k, v, mask = call.query, call.key, call.value, call.mask
    return F.scaled_dot_product_attention(q, k, v, mask, call.dropout_p, call.is_causal, scale=call.scale)


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
