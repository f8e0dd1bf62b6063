"""The small form in which a captured graph is read: one name for an operation, whatever its spelling, and labels for
the dimensions that it moves.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

Labels = tuple[Hashable, ...]

_SPELLINGS = {
    "matmul": "bmm mm imatmul linalg_matmul",
    "baddbmm": "addmm",
    "div": "truediv itruediv true_divide divide",
    "mul": "imul multiply rmul",
    "add": "iadd radd",
    "sub": "isub subtract",
    "view": "reshape",
    "transpose": "swapaxes swapdims",
    "T": "numpy_T",  # x.T as Dynamo notes it since torch 2.15, like x.mT under its name; before, as a getattr
    "mH": "matrix_H",
    "to": "float half bfloat16 double type_as type",
    "same": "clone contiguous",
}
_NAMES = {spelling: name for name, spellings in _SPELLINGS.items() for spelling in spellings.split()}
_VIEWS = "getitem getattr unsqueeze squeeze view expand expand_as transpose permute T mT mH detach narrow select to"
VIEWS = frozenset(_VIEWS.split())
_IN_PLACE = frozenset(name for name in dir(operator) if name[0] == "i" and f"__{name}__" in dir(operator))
_IN_PLACE -= {"index", "inv", "invert"}
# Operations that give a tensor of one number: which of their arguments it is.
_FILLED = {
    **dict.fromkeys(("full", "full_like"), (1, "fill_value")),
    **dict.fromkeys(("tensor", "scalar_tensor", "to", "same", "expand", "expand_as"), (0, "data")),
    **{"new_full": (2, "fill_value"), "new_tensor": (1, "data")},
}
_SWITCHES = ("grad_enabled", "autocast", "inference_mode")
_ARITHMETIC = ("neg", "mul", "add", "sub")
_OF_TORCH = ("torch", operator.add.__module__, "operator")


def op_name(node: Node) -> str:
    """The operation in one spelling, ``"matmul"`` for ``@``, ``bmm`` and ``Tensor.matmul`` alike; "" if not torch's."""
    module = getattr(node.target, "__module__", None) or "torch"
    if node.op == "call_function" and node.target is not getattr and module.partition(".")[0] not in _OF_TORCH:
        return ""
    name = _plain_name(node).removesuffix("_").removeprefix("special_")
    return _NAMES.get(name, name)


def _plain_name(node: Node) -> str:
    name = str(node.target) if node.op == "call_method" else ""
    if node.op == "call_function":
        name = getattr(node.target, "__name__", "").partition(".")[0]  # torch.ops.aten.mul.Scalar; x.mT is a getattr
    is_operator = name.startswith("__") or getattr(node.target, "__module__", "") == operator.add.__module__
    return name.strip("_") if is_operator else name  # `and_` is `&`, and writes to nothing


def is_in_place(node: Node) -> bool:
    """Whether the node overwrites its first argument and returns it."""
    name = _plain_name(node)
    return name.endswith("_") or name in _IN_PLACE


def written_by(node: Node) -> list[Any]:
    """What a node overwrites: its target, an ``out=``, the input of a function with ``inplace=True``."""
    written: list[Any] = [node.args[0]] if is_in_place(node) or node.target is operator.setitem else []
    if node.kwargs.get("out") is not None:
        written.append(node.kwargs["out"])
    place = _place_of_inplace(node.target) if node.op == "call_function" else None
    if place is not None and argument(node, place, "inplace"):
        written.append(argument(node, 0, "input"))
    return written


@functools.cache
def _place_of_inplace(function: Any) -> int | None:
    try:
        return list(inspect.signature(function).parameters).index("inplace")
    except (TypeError, ValueError):  # has none, or is built in: whatever of those overwrites says so by its name
        return None


def argument(node: Node, position: int, name: str, default: Any = None) -> Any:
    """An argument by place or by keyword."""
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def value(node: Any) -> Any:
    """What the node held when the graph was captured: a fake tensor with its shape and dtype, a number, a symbol."""
    return node.meta.get("example_value") if isinstance(node, Node) else node


def is_tensor(node: Any) -> bool:
    return isinstance(node, Node) and isinstance(value(node), Tensor)


def rank(node: Any) -> int:
    return value(node).dim() if is_tensor(node) else -1


def equal_sizes(sizes: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether two shapes are known to be the same, without a guard on a symbol."""
    return len(sizes) == len(others) and all(map(statically_known_true, map(operator.eq, sizes, others)))


def constant(node: Any, seen: set[Node]) -> float | None:
    """The number that a node holds everywhere, if it was built from nothing but numbers; ``seen`` takes those nodes."""
    if isinstance(node, int | float):
        return float(node)
    if not is_tensor(node) or not value(node).is_floating_point():
        return None
    name = op_name(node)
    found: float | None = None
    if name in ("ones_like", "zeros_like", "ones", "zeros"):
        found = float(name.startswith("ones"))
    elif name in _FILLED:
        found = constant(argument(node, *_FILLED[name]), seen)
    elif name in _ARITHMETIC and not node.kwargs:
        numbers = [constant(operand, seen) for operand in node.args]
        found = getattr(operator, name)(*numbers) if None not in numbers else None
    if found is not None:
        seen.add(node)
    return found


# -- softmax -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Softmax:
    """A softmax of any spelling."""

    scores: Node
    dim: Any  # None if that is not said
    nodes: tuple[Node, ...]  # what it is spelled with, its result last
    is_safe: bool = False  # whether a row of -inf gives zeros, instead of NaN


def read_softmax(node: Node) -> Softmax | None:
    """The node as the result of a softmax; None if it is something else."""
    name = op_name(node)
    inner = argument(node, 0, "input")
    if not (is_tensor(node) and is_tensor(inner)):
        return None
    is_safe = name.endswith("safe_softmax")
    if name == "softmax" or is_safe:
        return Softmax(inner, argument(node, 1, "dim"), (node,), is_safe)
    if name == "exp" and op_name(inner) == "log_softmax":
        return Softmax(argument(inner, 0, "input"), argument(inner, 1, "dim"), (inner, node))
    if name == "exp" and op_name(inner) == "sub":
        return _normalised(argument(inner, 0, "input"), argument(inner, 1, "other"), "logsumexp", (inner, node))
    if name == "div" and op_name(inner) == "exp":
        found = _normalised(inner, argument(node, 1, "other"), "sum", (inner, node))
        return replace(found, scores=argument(inner, 0, "input")) if found else None
    return None


def _normalised(source: Node, by: Any, name: str, nodes: tuple[Node, ...]) -> Softmax | None:
    """A softmax put together, if ``by`` is the sum or logsumexp of ``source`` over one dimension, kept as one."""
    kept = by
    while is_tensor(by) and op_name(by) in ("unsqueeze", "getitem"):
        nodes, by = (by, *nodes), by.args[0]
    if not is_tensor(by) or op_name(by) != name or argument(by, 0, "input") is not source:
        return None
    dims = argument(by, 1, "dim")
    dim = dims[0] if isinstance(dims, list | tuple) and len(dims) == 1 else dims
    if not isinstance(dim, int):
        return None
    sizes = list(value(source).shape)
    sizes[dim] = 1
    return Softmax(source, dim, (by, *nodes)) if equal_sizes(value(kept).shape, sizes) else None


# -- products ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Product:
    """A matrix product, each dimension of its operands and its result labelled."""

    operands: tuple[Node, Node]
    labels: tuple[Labels, Labels]  # of the operands' dimensions
    out: Labels  # of the result's
    contracted: Hashable  # the label summed over


def read_product(node: Any) -> Product | None:
    """The node as a product of two matrices, or stacks of them; None if it is something else."""
    name = op_name(node) if is_tensor(node) else ""
    if name == "matmul":
        return _matmul(argument(node, 0, "input"), argument(node, 1, "other", node.kwargs.get("mat2")))
    if name == "baddbmm":
        left, right = node.kwargs.get("mat1"), node.kwargs.get("mat2")
        return _matmul(argument(node, 1, "batch1", left), argument(node, 2, "batch2", right))
    return _einsum(node) if name == "einsum" else None


def _matmul(left: Any, right: Any) -> Product | None:
    if rank(left) < 2 or rank(right) < 2:
        return None
    batches = _batch(rank(left) - 2), _batch(rank(right) - 2)
    sides = (*batches[0], "row", "in"), (*batches[1], "in", "column")
    return Product((left, right), sides, (*max(batches, key=len), "row", "column"), "in")


def _batch(count: int) -> Labels:
    """Labels of so many dimensions in front, counted from the last: that is how they broadcast."""
    return tuple(("batch", index) for index in reversed(range(count)))


def _einsum(node: Node) -> Product | None:
    args: Any = node.args
    equation, *operands = args
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = list(operands[0])
    if not isinstance(equation, str) or len(operands) != 2 or not all(is_tensor(operand) for operand in operands):
        return None
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    sides = inputs.split(",")
    if not arrow or len(sides) != 2:
        return None
    left, right = (_letters(side, rank(operand)) for side, operand in zip(sides, operands, strict=True))
    extra = max(sum(isinstance(label, tuple) for label in labels) for labels in (left, right))
    out = _letters(output, len(output.replace("...", "")) + (extra if "..." in output else 0))
    repeats = any(len(set(labels)) != len(labels) for labels in (left, right, out))
    summed = {*left, *right}.difference(out)
    if repeats or len(summed) != 1 or not summed <= {*left} & {*right}:
        return None
    (contracted,), (first, second) = summed, operands
    if not statically_known_true(  # one of one is stretched to the other
        value(first).shape[left.index(contracted)] == value(second).shape[right.index(contracted)]
    ):
        return None
    return Product((first, second), (left, right), out, contracted)


def _letters(side: str, dims: int) -> Labels:
    before, dots, after = side.partition("...")
    return (*before, *_batch(dims - len(before) - len(after)), *after) if dots else tuple(side)


# -- shapes --------------------------------------------------------------------------------------------------------


def permuted(node: Node, labels: Labels) -> Labels | None:
    """The labels after a transposition of any spelling; None if the node is none."""
    name = op_name(node)
    if name == "getattr" and len(node.args) == 2:  # x.mT
        name = str(node.args[1])
    order: Any = list(range(len(labels)))
    if name in ("mT", "adjoint", "mH") or (name in ("T", "t") and len(labels) == 2):
        order[-2:] = order[:-3:-1]
    elif name == "transpose":
        first, second = argument(node, 1, "dim0"), argument(node, 2, "dim1")
        order[first], order[second] = order[second], order[first]
    elif name == "permute":
        order = _listed(node.args[1:]) or node.kwargs["dims"]
    else:
        return None
    return tuple(labels[index] for index in order)


def sizes_of_view(node: Node) -> Sequence[Any]:
    """The sizes that ``view`` or ``reshape`` was given: numbers, symbols, -1."""
    by_name: Any = node.kwargs.get("shape", node.kwargs.get("size", ()))
    return _listed(node.args[1:]) or list(by_name)


def _listed(args: Any) -> list[Any]:
    return list(args[0]) if len(args) == 1 and isinstance(args[0], list | tuple | torch.Size) else list(args)


# -- what is no attention ------------------------------------------------------------------------------------------


class NotAttentionError(Exception):
    """Why something that looked like attention is left alone; the text goes into the report."""


def need(condition: bool, reason: str) -> None:
    if not condition:
        raise NotAttentionError(reason)


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
