"""Replaces matched attention in a captured graph by one fused call, and leaves everything else as it was."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from lightning_accel.techniques.flash_attention.call import AttentionFinding, AttentionForm, Edit, sdpa
from lightning_accel.techniques.flash_attention.fused import Compute, FusedAttention, MaskSource
from lightning_accel.techniques.flash_attention.graph import (
    VIEWS,
    Labels,
    equal_sizes,
    is_in_place,
    is_tensor,
    op_name,
    permuted,
    rank,
    read_product,
    value,
    written_by,
)
from lightning_accel.techniques.flash_attention.match import find_attention

# From these, and what the module holds, a mask may be computed out of turn: they have no effect but their result.
_PURE_NAMES = (
    "getitem getattr size eq ne lt gt le ge logical_not logical_and logical_or invert bitwise_not and or xor not neg"
    " add sub rsub mul div floordiv mod abs tril triu ones zeros full arange tensor ones_like zeros_like full_like"
    " unsqueeze squeeze view expand expand_as repeat transpose permute T mT mH to bool int long byte same masked_fill"
    " where flip detach narrow select"
)
_PURE = frozenset(_PURE_NAMES.split())
_ASK_FOR_SHAPE = frozenset(("size", "ones_like", "zeros_like", "full_like"))
_KEEP_SHAPE = frozenset(("add", "sub", "mul", "div", "masked_fill", "softmax", "dropout", "to", "same"))
_FRESH = frozenset(("matmul", "einsum", "baddbmm", "add", "sub", "mul", "div", "masked_fill", "where"))


def by_sdpa(original: Callable[..., Tensor], fused: Callable[..., Tensor], args: tuple[Any, ...]) -> Tensor:
    """Computes a fused attention as torch does, the kernel being torch's choice."""
    return fused(sdpa, *args)


def fuse_attention(module: GraphModule, compute: Compute = by_sdpa) -> list[AttentionFinding]:
    """Replaces every attention in a captured graph, in place, and returns what there was around every softmax.

    The graph has the fake tensors that the capture left in its nodes. ``compute`` has each attention computed: by its
    original, a function of ``args``, or fused, one of an ``Attend`` and them.
    """
    _take_sizes_from_operands(module.graph)
    _read_writes_as_values(module.graph)
    findings: list[AttentionFinding] = []
    for finding in find_attention(module.graph):
        if finding.form is not None:
            _replace(module, finding.form, compute)
        findings.append(finding)
    if any(finding.form for finding in findings):
        module.recompile()
    return findings


# -- before: what stands in the way ----------------------------------------------------------------------------------


def _read_writes_as_values(graph: Graph) -> None:
    """Lets every later reader of a tensor that is written in place read the writing node: ``x += 1; x`` → ``x += 1``.

    It is the same tensor. ``scores[mask] = -inf`` on a fresh tensor becomes the ``masked_fill`` that it amounts to.
    """
    place = {node: index for index, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        if is_in_place(node) and is_tensor(node.args[0]) and is_tensor(node):
            target = node.args[0]
            for user in [user for user in target.users if place[user] > place[node]]:
                user.replace_input_with(target, node)
        elif node.op == "call_function" and node.target is operator.setitem:
            target, mask, fill = node.args
            is_mask = is_tensor(mask) and value(mask).dtype == torch.bool and rank(mask) == rank(target)
            # An assignment takes a mask on the host for scores on a device, and masked_fill does not.
            is_mask = is_mask and value(mask).device == value(target).device
            is_fresh = is_tensor(target) and op_name(target) in _FRESH and not is_in_place(target)
            is_unread = is_fresh and all(place[user] >= place[node] for user in target.users)
            if is_mask and is_unread and not is_tensor(fill):
                with graph.inserting_before(node):
                    filled = graph.call_method("masked_fill", (target, mask, fill))
                filled.meta = {"example_value": value(target)}
                place[filled] = place[node]
                target.replace_all_uses_with(filled, delete_user_cb=lambda user, new=filled: user is not new)
                graph.erase_node(node)


def _take_sizes_from_operands(graph: Graph) -> None:
    """Lets whoever wants nothing but the shape of scores ask their operands: the scores will not be there."""
    for node in list(graph.nodes):
        is_like = op_name(node).endswith("_as") or op_name(node) == "to"  # x.type_as(scores) is x.to(scores)
        if not (is_like or op_name(node) in _ASK_FOR_SHAPE) or len(node.args) <= is_like:
            continue
        like: Any = node.args[is_like]
        root = like
        while is_tensor(root) and read_product(root) is None and op_name(root) in _KEEP_SHAPE:
            root = root.args[0]
        product = read_product(root)
        if product is None or not equal_sizes(value(root).shape, value(like).shape):
            continue
        operands: Any = (*product.operands, product.labels, product.out)
        with graph.inserting_before(node):
            size = graph.call_function(product_size, operands)
            made = graph.call_function(stand_in, (size, value(like).dtype, value(like).device))
        size.meta = {"example_value": value(like).shape}  # from which on a mask is made of numbers
        made.meta = dict(like.meta)
        node.update_arg(int(is_like), made)


def product_size(left: Tensor, right: Tensor, labels: tuple[Labels, Labels], out: Labels) -> torch.Size:
    """The size that a product of the two will have."""
    sizes: dict[Hashable, int] = {}
    for tensor, names in zip((left, right), labels, strict=True):
        sizes |= {name: size for name, size in zip(names, tensor.shape, strict=True) if sizes.get(name, 1) == 1}
    return torch.Size(sizes[name] for name in out)


def stand_in(size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of a size that takes no memory, for whoever asks for nothing else."""
    return torch.empty((), dtype=dtype, device=device).expand(size)


# -- the replacement -----------------------------------------------------------------------------------------------


def _replace(module: GraphModule, form: AttentionForm, compute: Compute) -> None:
    graph, last = module.graph, form.last
    sources = {edit.by: source for edit in form.edits if (source := _mask_source(module, edit)) is not None}
    given = [operand[0] for operand in (form.query, form.key, form.value)]
    numbers = [form.dropout_p, *(size for sizes in form.levels for size in sizes)]
    given += [number for number in numbers if isinstance(number, Node)]
    for edit in form.edits:
        given += sources[edit.by].leaves if edit.by in sources else [edit.by] if isinstance(edit.by, Node) else []
    leaves, inner = _traced_back(last, lambda node: node in given or node.op == "placeholder")
    inputs = list(dict.fromkeys([*given, *leaves]))
    original = _function(module, inner, inputs, last)
    layout = _layout(last) if _layout_matters(last) else None
    fused = FusedAttention(form, inputs, sources, original, layout, compute)
    with graph.inserting_before(last):
        call = graph.call_function(fused.call, tuple(inputs))
    call.meta = dict(last.meta)
    last.replace_all_uses_with(call)
    for node in reversed(list(graph.nodes)):
        if not node.users and (node in form.chain or (_is_pure(node) and not written_by(node))):
            graph.erase_node(node)


def _traced_back(output: Node, is_leaf: Callable[[Node], bool]) -> tuple[list[Node], set[Node]]:
    """What ``output`` is computed from, and the nodes on the way, itself included."""
    leaves: list[Node] = []
    inner: set[Node] = set()
    waiting = [output]
    while waiting:
        node = waiting.pop()
        if is_leaf(node):
            leaves.append(node)
        elif node not in inner:
            inner.add(node)
            waiting += node.all_input_nodes
    return list(dict.fromkeys(leaves)), inner


def _function(module: GraphModule, inner: set[Node], inputs: Iterable[Node], output: Node) -> Callable[..., Tensor]:
    """A part of a graph by itself."""
    graph = Graph()
    copies = {node: graph.placeholder(f"input_{index}") for index, node in enumerate(inputs)}
    for node in module.graph.nodes:
        if node in inner and node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(copies[output])
    return GraphModule(module, graph).forward


def _mask_source(module: GraphModule, edit: Edit) -> MaskSource | None:
    """The mask as a calculation of its own from what the graph is given; None if it depends on more."""
    mask = edit.by
    if edit.kind not in ("keep", "hide") and (edit.kind != "add" or value(mask).requires_grad):
        return None

    def is_leaf(node: Node) -> bool:
        is_number = not isinstance(value(node), Tensor | tuple | list) or isinstance(value(node), torch.Size)
        return node.op == "placeholder" or is_number

    leaves, inner = _traced_back(mask, is_leaf)
    if not all(_is_pure(node) for node in inner) or any(_is_written_to(node) for node in (*leaves, *inner)):
        return None
    is_constant = all(_is_held_by_module(leaf) for leaf in leaves if is_tensor(leaf))
    return MaskSource(_function(module, inner, leaves, mask), leaves, is_constant)


def _is_pure(node: Node) -> bool:
    return node.op == "get_attr" or op_name(node) in _PURE or node.target in (stand_in, product_size)


def _is_written_to(node: Node) -> bool:
    """Whether a tensor, or a view of it, is overwritten in the graph: its value then depends on when it is read."""
    return any(node in written_by(user) or (op_name(user) in VIEWS and _is_written_to(user)) for user in node.users)


def _is_held_by_module(placeholder: Node) -> bool:
    source = getattr(placeholder.meta.get("grapharg"), "source", None)
    name: Any = getattr(source, "name", "")
    name = name() if callable(name) else name  # a method until torch 2.11
    return str(name).startswith("L['self']")


def _layout(node: Node) -> tuple[int, ...]:
    """The dimensions of a result from the outermost in memory to the innermost."""
    strides = value(node).stride()  # numbers, or symbols, which have no order of their own
    return tuple(
        sorted(range(rank(node)), key=lambda dim: sum(statically_known_true(strides[dim] < other) for other in strides))
    )


def _layout_matters(node: Node) -> bool:
    """Whether something after ``node`` depends on how its result lies in memory, as ``view`` does, and dropout."""
    for user in node.users:
        name = str(getattr(user.target, "__name__", user.target))
        if name in ("contiguous", "linear") or op_name(user) in ("matmul", "einsum"):
            continue
        if name in ("reshape", "flatten") and rank(user) < rank(node):  # heads that are put together lie anew
            continue
        if permuted(user, tuple(range(rank(node)))) is None or _layout_matters(user):
            return True
    return False
