"""Reads single nodes of a captured graph: which operation it is, however it was spelled, and on which dimensions."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

Labels = tuple[Hashable, ...]

_ALIASES = {
    **dict.fromkeys(("bmm", "mm", "__matmul__", "imatmul"), "matmul"),
    **dict.fromkeys(("truediv", "itruediv", "true_divide", "divide", "__truediv__"), "div"),
    **dict.fromkeys(("imul", "multiply", "__mul__", "__rmul__"), "mul"),
    **dict.fromkeys(("iadd", "__add__", "__radd__"), "add"),
    **dict.fromkeys(("isub", "subtract", "__sub__"), "sub"),
    **dict.fromkeys(("reshape", "view", "_reshape_copy"), "view"),
    **dict.fromkeys(("swapaxes", "swapdims"), "transpose"),
    **dict.fromkeys(("float", "half", "bfloat16", "double", "type_as", "type"), "to"),
    **dict.fromkeys(("clone", "contiguous"), "same"),
    "neg": "neg",
}
VIEWS = frozenset(
    (
        *("getitem", "getattr", "unsqueeze", "squeeze", "view", "expand", "expand_as", "transpose", "permute"),
        *("detach", "narrow", "select", "to"),
    )
)
_IN_PLACE_OPERATORS = frozenset(
    getattr(operator, name) for name in dir(operator) if name.startswith("i") and f"__{name}__" in dir(operator)
) - {operator.index, operator.inv, operator.invert}


def op_name(node: Node) -> str:
    """The operation in one spelling, ``"matmul"`` for ``@``, ``bmm`` and ``Tensor.matmul`` alike; "" if not torch's."""
    if node.op == "call_method":
        name = str(node.target)
        name = name[:-1] if is_in_place(node) else name
        return _ALIASES.get(name, name)
    if node.op != "call_function":
        return ""
    if node.target is getattr:  # x.mT
        return "getattr"
    module = getattr(node.target, "__module__", None) or "torch"
    if module.partition(".")[0] not in ("torch", "_operator", "operator"):
        return ""
    name = getattr(node.target, "__name__", "")
    name = name[:-1] if is_in_place(node) and name.endswith("_") else name
    return _ALIASES.get(name, name)


def is_in_place(node: Node) -> bool:
    """Whether the node overwrites its first argument and returns it."""
    if node.op == "call_method":
        name = str(node.target)
        return name.endswith("_") and not name.endswith("__")
    if node.op != "call_function":
        return False
    name = getattr(node.target, "__name__", "")
    return node.target in _IN_PLACE_OPERATORS or (name.endswith("_") and not name.endswith("__"))


def written_by(node: Node) -> list[Any]:
    """What a node overwrites: its target, an ``out=``, the input of a function with ``inplace=True``."""
    written: list[Any] = [node.args[0]] if is_in_place(node) or node.target is operator.setitem else []
    if node.kwargs.get("out") is not None:
        written.append(node.kwargs["out"])
    if node.op == "call_function" and _flag(node, "inplace"):
        written.append(argument(node, 0, "input"))
    return written


def _flag(node: Node, name: str) -> bool:
    if name in node.kwargs:
        return bool(node.kwargs[name])
    parameters = _parameters(node.target)
    return name in parameters and len(node.args) > parameters.index(name) and bool(node.args[parameters.index(name)])


@functools.cache
def _parameters(function: Any) -> list[str]:
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # built in: whatever of torch's overwrites says so by its name
        return []


def value(node: Any) -> Any:
    """What the node held when the graph was captured: a fake tensor with its shape and dtype, a number, a symbol."""
    return node.meta.get("example_value") if isinstance(node, Node) else node


def is_tensor(node: Any) -> bool:
    return isinstance(node, Node) and isinstance(value(node), Tensor)


def rank(node: Any) -> int:
    found = value(node)
    return found.dim() if isinstance(found, Tensor) else -1


def same_shape(node: Any, other: Any) -> bool:
    """Whether two tensors are known to have the same shape, without a guard on a symbol."""
    return equal_sizes(value(node).shape, value(other).shape)


def equal_sizes(sizes: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(sizes) == len(others) and all(
        statically_known_true(size == other) for size, other in zip(sizes, others, strict=True)
    )


def argument(node: Node, position: int, name: str, default: Any = None) -> Any:
    """An argument by place or by keyword."""
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


@dataclass(frozen=True)
class Product:
    """A matrix product, each dimension of its operands and its result labelled.

    Attributes:
        operands: Left and right.
        labels: Of the left operand's dimensions, and of the right's.
        out: Of the result's.
        contracted: The label summed over.
    """

    operands: tuple[Node, Node]
    labels: tuple[Labels, Labels]
    out: Labels
    contracted: Hashable


def product_size(
    left: Tensor, right: Tensor, labels: tuple[Labels, Labels], out: Labels, dim: int | None = None
) -> Any:
    """The size that a product of the two will have, or has in one dimension."""
    sizes: dict[Hashable, int] = {}
    for tensor, names in zip((left, right), labels, strict=True):
        for name, size in zip(names, tensor.shape, strict=True):
            sizes[name] = size if sizes.get(name, 1) == 1 else sizes[name]
    whole = torch.Size(sizes[name] for name in out)
    return whole if dim is None else whole[dim]


def read_product(node: Node) -> Product | None:
    """The node as a product of two matrices, or stacks of them; None if it is something else."""
    name = op_name(node)
    if name == "matmul":
        return _matmul(node, argument(node, 0, "input"), argument(node, 1, "other", node.kwargs.get("mat2")))
    if name == "baddbmm":
        return _matmul(node, argument(node, 1, "batch1"), argument(node, 2, "batch2"))
    return _einsum(node) if name == "einsum" else None


def _matmul(node: Node, left: Any, right: Any) -> Product | None:
    if rank(left) < 2 or rank(right) < 2:
        return None

    def labels(count: int, row: str, column: str) -> Labels:
        return (*(("batch", i) for i in reversed(range(count - 2))), row, column)

    return Product(
        (left, right),
        (labels(rank(left), "row", "in"), labels(rank(right), "in", "column")),
        labels(max(rank(left), rank(right)), "row", "column"),
        "in",
    )


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
    extra = max(rank(o) - len(s.replace("...", "")) if "..." in s else 0 for o, s in zip(operands, sides, strict=True))
    left = _letters(sides[0], rank(operands[0]))
    right = _letters(sides[1], rank(operands[1]))
    out = _letters(output, len(output.replace("...", "")) + (extra if "..." in output else 0))
    shared = [label for label in left if label in right and label not in out]
    repeats = any(len(set(labels)) != len(labels) for labels in (left, right, out))
    lost = [label for label in (*left, *right) if label not in out and label not in shared]
    if repeats or lost or len(shared) != 1:
        return None
    return Product((operands[0], operands[1]), (left, right), out, shared[0])


def _letters(side: str, dims: int) -> Labels:
    before, dots, after = side.partition("...")
    count = dims - len(before) - len(after)
    return (*before, *(("batch", i) for i in reversed(range(count))), *after) if dots else tuple(side)


def permuted(node: Node, labels: Labels) -> Labels | None:
    """The labels after a transposition of any spelling; None if the node is none."""
    name, dims = op_name(node), len(labels)
    if name == "getattr" and len(node.args) == 2:  # x.mT
        name = str(node.args[1])
    if name in ("mT", "T", "t", "adjoint", "mH"):
        order = [*range(dims - 2), dims - 1, dims - 2]
        return tuple(labels[i] for i in order) if name in ("mT", "adjoint", "mH") or dims == 2 else None
    if name == "transpose":
        first, second = argument(node, 1, "dim0"), argument(node, 2, "dim1")
        if not (isinstance(first, int) and isinstance(second, int)):
            return None
        swapped = list(labels)
        swapped[first], swapped[second] = swapped[second], swapped[first]
        return tuple(swapped)
    if name == "permute":
        given: Any = _listed(node.args[1:]) or node.kwargs.get("dims", ())
        return tuple(labels[i] for i in given) if all(isinstance(i, int) for i in given) else None
    return None


def sizes_of_view(node: Node) -> Sequence[Any]:
    """The sizes that ``view`` or ``reshape`` was given: numbers, symbols, -1."""
    by_name: Any = node.kwargs.get("shape", node.kwargs.get("size", ()))
    return _listed(node.args[1:]) or list(by_name)


def _listed(args: Any) -> list[Any]:
    return list(args[0]) if len(args) == 1 and isinstance(args[0], list | tuple | torch.Size) else list(args)
