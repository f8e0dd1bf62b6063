"""Replaces attention that a captured model writes out by torch's single operation.

Torch, OpenVINO and TensorRT have kernels for this operation. Scale, mask and softmax then do not each write and read
the scores of (B, H, T, S).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Graph, Node

from lightning_accel.techniques.flash_attention.call import AttentionForm, Edit
from lightning_accel.techniques.flash_attention.graph import equal_sizes, value
from lightning_accel.techniques.flash_attention.masks import HIDES_BELOW
from lightning_accel.techniques.flash_attention.match import find_attention

_aten: Any = torch.ops.aten


def fuse_attention(program: ExportedProgram) -> int:
    """Replaces softmax(scale * query @ key^T + mask) @ value in place. Returns the number of replacements.

    Other forms are not changed: scores in another dtype or reshaped; two masks; attention returned directly by the
    model.
    """
    graph, replaced = program.graph_module.graph, 0
    for node in graph.nodes:
        if "val" in node.meta:
            node.meta["example_value"] = node.meta["val"]
    for finding in find_attention(graph):
        if finding.form is not None and _is_plain(finding.form):
            _replace(graph, finding.form)
            replaced += 1
    for node in graph.nodes:
        node.meta.pop("example_value", None)
    if replaced:
        program.graph_module.recompile()
    return replaced


def _is_plain(form: AttentionForm) -> bool:
    parts = (form.query, form.key, form.value)
    kinds = [edit.kind for edit in form.edits]
    masks = [edit for edit in form.edits if edit.kind not in ("multiply", "divide")]
    is_scaled_first = all(kind in ("multiply", "divide") for kind in kinds[: len(kinds) - len(masks)])
    if len(form.levels) > 1 or len(masks) > 1 or form.dropout_p != 0 or not is_scaled_first:
        return False
    if any(None in order or len({value(node).dtype, value(form.last).dtype}) > 1 for node, order in parts):
        return False
    batches = [[value(node).shape[index] for index in order[:-2] if index is not None] for node, order in parts]
    is_alike = all(len(batch) == 2 and equal_sizes(batch, batches[0]) for batch in batches)
    is_returned = any(user.op == "output" for user in form.last.users)  # outputs are known by name
    numbers = all(isinstance(edit.by, int | float) and edit.by > 0 for edit in form.edits if edit not in masks)
    return is_alike and numbers and not is_returned and all(_is_mask(edit, value(form.last).dtype) for edit in masks)


def _is_mask(edit: Edit, dtype: torch.dtype) -> bool:
    if edit.kind == "add":
        return edit.factor == 1 and getattr(value(edit.by), "dtype", None) == dtype
    return edit.kind in ("keep", "hide") and edit.fill <= HIDES_BELOW and value(edit.by).dtype == torch.bool


def _replace(graph: Graph, form: AttentionForm) -> None:
    last, scale, mask, kept, fill = form.last, 1.0, None, None, -math.inf
    with graph.inserting_before(last):
        q, k, v = (_permuted(graph, last, *part) for part in (form.query, form.key, form.value))
        for edit in form.edits:
            if edit.kind in ("multiply", "divide"):
                scale = scale * edit.by if edit.kind == "multiply" else scale / edit.by
                continue
            by, fill = edit.by, edit.fill
            for _ in range(4 - value(by).dim()):
                by = _call(graph, last, _aten.unsqueeze.default, by, 0)
            by = _permuted(graph, last, by, edit.order)
            mask = _call(graph, last, _aten.bitwise_not.default, by) if edit.kind == "hide" else by
            kept = _call(graph, last, _aten.gt.Scalar, mask, -math.inf) if edit.kind == "add" else mask
        new = _call(graph, last, _aten.scaled_dot_product_attention.default, q, k, v, mask, scale=scale)
        if kept is not None and not (form.zero_rows and fill == -math.inf):
            # The fused operation returns zeros for a query without visible keys. The written-out one has equal scores:
            # it returns NaN if they are -inf, and the mean of all values if they are a finite number.
            has_keys = _call(graph, last, _aten.any.dim, kept, -1, True)
            if fill == -math.inf:
                new = _call(graph, last, _aten.where.ScalarOther, has_keys, new, math.nan)
            else:
                mean = _call(graph, last, _aten.mean.dim, v, [-2], True)
                new = _call(graph, last, _aten.where.self, has_keys, new, mean)
        new = _permuted(graph, last, new, form.out_order)
    last.replace_all_uses_with(new)
    for node in reversed(list(graph.nodes)):
        if node in form.chain and not node.users:
            graph.erase_node(node)


def _permuted(graph: Graph, like: Node, node: Node, order: Any) -> Node:
    if tuple(order) == tuple(range(len(order))):
        return node
    return _call(graph, like, _aten.permute.default, node, list(order))


def _call(graph: Graph, like: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
    """Adds a node with the metadata of ``like``: its line of the model's code and its module."""
    node = graph.call_function(target, args, kwargs)
    found = target(*(one.meta["val"] if isinstance(one, Node) else one for one in args), **kwargs)
    node.meta = {**like.meta, "val": found, "example_value": found}
    return node
