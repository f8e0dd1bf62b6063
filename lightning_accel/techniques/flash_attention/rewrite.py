"""Replaces matched attention in a captured graph by one fused call, and leaves everything else as it was."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from lightning_accel.techniques.flash_attention.fused import (
    Arg,
    Attend,
    BoundStep,
    FusedAttention,
    MaskSource,
    Recipe,
    Rehearse,
)
from lightning_accel.techniques.flash_attention.graph_ops import (
    VIEWS,
    argument,
    is_in_place,
    is_tensor,
    op_name,
    permuted,
    product_size,
    rank,
    read_product,
    same_shape,
    value,
    written_by,
)
from lightning_accel.techniques.flash_attention.pattern import Match, Step, find_attention

# From these, and what the module holds, a mask may be computed out of turn: they have no effect but their result.
_PURE = frozenset(
    (
        *("getitem", "getattr", "size", "eq", "ne", "lt", "gt", "le", "ge", "__eq__", "__ne__", "__lt__", "__gt__"),
        *("__le__", "__ge__", "logical_not", "logical_and", "logical_or", "invert", "__invert__", "and_", "or_"),
        *("__and__", "__or__", "not_", "neg", "add", "sub", "mul", "div", "floordiv", "mod", "abs", "tril", "triu"),
        *("ones", "zeros", "full", "arange", "tensor", "ones_like", "zeros_like", "full_like", "unsqueeze", "squeeze"),
        *("view", "expand", "expand_as", "repeat", "transpose", "permute", "to", "bool", "int", "long", "byte", "same"),
        *("masked_fill", "where", "flip", "detach", "narrow", "select"),
    )
)
_ASK_FOR_SHAPE = frozenset(("size", "ones_like", "zeros_like", "full_like", "view_as", "expand_as", "reshape_as"))
_KEEP_SHAPE = frozenset(("add", "sub", "mul", "div", "masked_fill", "softmax", "dropout", "to", "same"))


@dataclass
class Rewriting:
    """What a graph held: how many attentions were fused, and why others were left alone."""

    fused: int = 0
    left_alone: list[str] = field(default_factory=list)


def fuse_attention(
    module: GraphModule, attend: Attend, rehearsal: Callable[[], Rehearse | None] = lambda: None
) -> Rewriting:
    """Replaces every attention in a captured graph.

    Args:
        module: The graph, with the fake tensors that the capture left in its nodes. Edited in place.
        attend: Computes one attention.
        rehearsal: Tells, when asked at a call, whether and by what the call is tried.
    """
    found = Rewriting()
    _take_sizes_from_operands(module.graph)
    _read_writes_as_values(module.graph)
    for match in find_attention(module.graph):
        if isinstance(match, str):
            found.left_alone.append(match)
        else:
            _replace(module, match, attend, rehearsal, f"fused_attention_{found.fused}")
            found.fused += 1
    if found.fused:
        module.recompile()
    return found


def _read_writes_as_values(graph: Graph) -> None:
    """Lets every later reader of a tensor that is written in place read the writing node: ``x += 1; x`` → ``x += 1``.

    It is the same tensor. ``scores[mask] = -inf`` on a fresh tensor becomes the ``masked_fill`` that it amounts to.
    """
    place = {node: index for index, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        if is_in_place(node) and isinstance(node.args[0], Node) and is_tensor(node):
            target = node.args[0]
            later = [user for user in target.users if place[user] > place[node]]
            for user in later:
                user.replace_input_with(target, node)
        elif node.op == "call_function" and node.target is operator.setitem:
            _read_masked_assignment(graph, node, place)


def _read_masked_assignment(graph: Graph, node: Node, place: dict[Node, int]) -> None:
    target, mask, fill = node.args
    if not (is_tensor(target) and is_tensor(mask) and value(mask).dtype == torch.bool and rank(mask) == rank(target)):
        return
    assert isinstance(target, Node)
    is_fresh = op_name(target) in ("matmul", "einsum", "baddbmm", "add", "sub", "mul", "div", "masked_fill", "where")
    others = [user for user in target.users if user is not node]
    if not is_fresh or is_in_place(target) or is_tensor(fill) or any(place[user] < place[node] for user in others):
        return
    with graph.inserting_before(node):
        filled = graph.call_method("masked_fill", (target, mask, fill))
    filled.meta = {"example_value": value(target)}
    place[filled] = place[node]
    target.replace_all_uses_with(filled, delete_user_cb=lambda user: user not in (filled, node))
    graph.erase_node(node)


def _take_sizes_from_operands(graph: Graph) -> None:
    """Lets whoever wants nothing but the shape of scores ask their operands: the scores will not be there."""
    for node in list(graph.nodes):
        name = op_name(node)
        if name not in _ASK_FOR_SHAPE:
            continue
        like = argument(node, 1, "other") if name.endswith("_as") else argument(node, 0, "input")
        if not is_tensor(like):
            continue
        root: Any = like
        while read_product(root) is None and op_name(root) in _KEEP_SHAPE and is_tensor(root.args[0]):
            root = root.args[0]
        product = read_product(root)
        if product is None or not same_shape(root, like):
            continue
        with graph.inserting_before(node):
            operands: Any = (*product.operands, product.labels, product.out)
            if name == "size":
                made = graph.call_function(product_size, (*operands, *node.args[1:]))
            else:
                size = graph.call_function(product_size, operands)
                size.meta = {"example_value": value(like).shape}
                made = _of_size(graph, node, size)
        made.meta = dict(node.meta)
        node.replace_all_uses_with(made)
        graph.erase_node(node)


def _of_size(graph: Graph, node: Node, size: Node) -> Node:
    """What a ``*_like`` or ``*_as`` does, for a size in place of a tensor that has it."""
    name = op_name(node)
    if name.endswith("_as"):
        return graph.call_method(name.removesuffix("_as"), (node.args[0], size))
    made = value(node)
    fill: Any = {"ones_like": 1, "zeros_like": 0}.get(name, argument(node, 1, "fill_value"))
    return graph.call_function(torch.full, (size, fill), {"dtype": made.dtype, "device": made.device})


class _Arguments:
    """The nodes that a fused call is given, each once."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []

    def place(self, node: Node) -> Arg:
        if node not in self.nodes:
            self.nodes.append(node)
        return Arg(self.nodes.index(node))


def _replace(
    module: GraphModule, match: Match, attend: Attend, rehearsal: Callable[[], Rehearse | None], name: str
) -> None:
    graph, arguments, last = module.graph, _Arguments(), match.last
    recipe = Recipe(
        query_order=match.query_order,
        key_order=match.key_order,
        value_order=match.value_order,
        levels=tuple(
            tuple(arguments.place(size) if isinstance(size, Node) else size for size in sizes) for sizes in match.levels
        ),
        steps=tuple(_bound(module, step, arguments) for step in match.steps),
        weights_level=match.weights_level,
        out_order=match.out_order,
        dropout_p=match.dropout_p,
        dtype=value(last).dtype,
        is_contiguous=_layout_matters(last) and value(last).is_contiguous(),
    )
    inner = _between(match, arguments)
    inputs = (match.query, match.key, match.value, *arguments.nodes)
    each = list(dict.fromkeys(inputs))
    places = [each.index(node) for node in inputs]
    module.add_module(name, FusedAttention(recipe, attend, _as_it_was(module, inner, each, last), places, rehearsal))
    with graph.inserting_before(last):
        call = graph.call_module(name, inputs)
    call.meta = dict(last.meta)
    last.replace_all_uses_with(call)
    candidates = {last, *match.chain, *match.constants}
    for node in reversed(list(graph.nodes)):
        is_spare = node in candidates or (node.op in ("call_function", "call_method") and op_name(node) in _PURE)
        if is_spare and not node.users and not (written_by(node) and node not in candidates):
            graph.erase_node(node)


def _between(match: Match, arguments: _Arguments) -> set[Node]:
    """What is computed between the inputs of an attention and its result; what else that takes becomes an argument."""
    given = {match.query, match.key, match.value, *arguments.nodes}
    inner: set[Node] = set()
    waiting = [match.last]
    while waiting:
        node = waiting.pop()
        if node in given or node in inner:
            continue
        if node.op == "placeholder":
            arguments.place(node)
        else:
            inner.add(node)
            waiting += node.all_input_nodes
    return inner


def _as_it_was(module: GraphModule, inner: set[Node], inputs: list[Node], last: Node) -> Callable[..., Tensor]:
    """The attention by itself, as a function of ``inputs``."""
    graph = Graph()
    copies: dict[Node, Node] = {node: graph.placeholder(f"input_{index}") for index, node in enumerate(inputs)}
    for node in module.graph.nodes:
        if node in inner and node not in copies:
            copies[node] = graph.node_copy(node, lambda source: copies[source])
    graph.output(copies[last])
    return GraphModule(module, graph).forward


def _bound(module: GraphModule, step: Step, arguments: _Arguments) -> BoundStep:
    arg: Any = step.arg
    if isinstance(arg, Node):
        can_be_looked_into = step.kind in ("keep", "hide") or (step.kind == "bias" and not value(arg).requires_grad)
        source = _mask_source(module, arg, arguments) if can_be_looked_into else None
        arg = source or arguments.place(arg)
    return BoundStep(step.kind, arg, step.power, step.level, step.order, step.fill)


def _mask_source(module: GraphModule, mask: Node, arguments: _Arguments) -> MaskSource | None:
    """The mask as a calculation of its own from what the graph is given; None if it depends on more."""
    leaves: list[Node] = []
    inner: set[Node] = set()
    waiting = [mask]
    while waiting:
        node = waiting.pop()
        if node in leaves or node in inner:
            continue
        is_number = not (is_tensor(node) or isinstance(value(node), tuple | list)) or isinstance(
            value(node), torch.Size
        )
        if node.op == "placeholder" or is_number:
            leaves.append(node)
        elif node.op == "get_attr" or op_name(node) in _PURE:
            inner.add(node)
            waiting += node.all_input_nodes
        else:
            return None
    if any(_is_written_to(node) for node in (*leaves, *inner)):
        return None
    graph = Graph()
    copies: dict[Node, Node] = {leaf: graph.placeholder(f"leaf_{index}") for index, leaf in enumerate(leaves)}
    for node in module.graph.nodes:
        if node in inner:
            copies[node] = graph.node_copy(node, lambda source: copies[source])
    graph.output(copies[mask])
    tensors = [leaf for leaf in leaves if is_tensor(leaf)]
    return MaskSource(
        compute=GraphModule(module, graph).forward,
        leaves=tuple(arguments.place(leaf) for leaf in leaves),
        is_constant=all(_is_held_by_module(leaf) for leaf in tensors),
    )


def _is_written_to(node: Node) -> bool:
    """Whether a tensor, or a view of it, is overwritten in the graph: its value then depends on when it is read."""
    for user in node.users:
        if node in written_by(user):
            return True
        if op_name(user) in VIEWS and _is_written_to(user):
            return True
    return False


def _is_held_by_module(placeholder: Node) -> bool:
    source = getattr(placeholder.meta.get("grapharg"), "source", None)
    name: Any = getattr(source, "name", "")
    name = name() if callable(name) else name  # a method until torch 2.11
    return str(name).startswith("L['self']")


def _layout_matters(node: Node) -> bool:
    """Whether something after ``node`` depends on how its result lies in memory, as ``view`` does."""
    for user in node.users:
        name = op_name(user)
        is_view = name == "view" and "view" in str(getattr(user.target, "__name__", user.target))
        if name in ("contiguous", "flatten", "linear", "matmul", "einsum") or (name == "view" and not is_view):
            continue
        if user.op == "call_method" and user.target == "contiguous":
            continue
        dims = tuple(range(rank(node)))
        if permuted(user, dims) is None or _layout_matters(user):
            return True
    return False
