"""Reads the expressions of a function: what each gives, what it reads, what it keeps."""

from __future__ import annotations

import ast
import types
from typing import TYPE_CHECKING, Any

from torch import nn

from lightning_accel.techniques.inplace_activations import catalog
from lightning_accel.techniques.inplace_activations.source import Function, UnreadableError
from lightning_accel.techniques.inplace_activations.tensors import Tensors
from lightning_accel.techniques.inplace_activations.values import (
    NOTHING,
    Facts,
    Foreign,
    Fresh,
    Known,
    Many,
    Method,
    Mod,
    Value,
    foreign,
    join,
)

if TYPE_CHECKING:
    from lightning_accel.techniques.inplace_activations.ownership import Reader

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_FORBIDDEN = frozenset({"locals", "globals", "vars", "eval", "exec", "dir", "__import__", "setattr", "delattr"})
_LOOKING = frozenset(
    {"isinstance", "issubclass", "hasattr", "len", "type", "id", "callable", "print", "repr", "str", "bool"}
)
_ITERATING = frozenset({"list", "tuple", "iter", "reversed", "enumerate", "zip", "sorted", "next", "filter"})
_FRESH_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.MatMult)


class Expressions(Tensors):
    """Abstract interpretation of expressions."""

    def __init__(self, reader: Reader, function: Function, module: nn.Module) -> None:
        super().__init__(reader, module, function.qualname, function.code)
        self.function = function
        self.loops: list[Any] = []

    def at(self, node: ast.AST) -> str:
        return f"line {getattr(node, 'lineno', '?')} of {self.function.qualname}"

    def eval(self, node: ast.expr) -> Value:
        method = getattr(self, f"eval_{type(node).__name__}", None)
        if method is None:
            raise UnreadableError(f"has a {type(node).__name__} expression ({self.at(node)})")
        result: Value = method(node)
        return result

    # Names and attributes

    def eval_Name(self, node: ast.Name) -> Value:  # noqa: N802
        return self.eval_name(node.id)

    def eval_name(self, name: str) -> Value:
        if name in self.now.names:
            return self.now.names[name]
        if name in self.function.code.co_varnames or name in self.function.code.co_cellvars:
            return NOTHING  # local and not bound on any path: reading it raises
        try:
            outer = self.function.outer(name)
        except KeyError:
            return foreign(f"comes from {name!r}, which is not known")
        if outer in (locals, globals, vars, eval, exec, dir):
            raise UnreadableError(f"uses {name}()")
        return self.python_value(outer, name)

    def python_value(self, value: Any, name: str) -> Value:
        """What an object that exists already (a global, an attribute of a module) stands for."""
        if isinstance(value, nn.Module):
            return (
                frozenset({Mod(value)})
                if self.reader.knows(value)
                else foreign(f"comes from {name!r}, outside the model")
            )
        if value is None or isinstance(value, bool | int | float | str):
            return NOTHING
        if isinstance(value, types.ModuleType | type) or callable(value):
            return frozenset({Known(value)})
        return foreign(f"comes from {name!r}, which outlives the step")

    def eval_Constant(self, node: ast.Constant) -> Value:  # noqa: N802
        return NOTHING

    def eval_Attribute(self, node: ast.Attribute) -> Value:  # noqa: N802
        base = self.eval(node.value)
        return frozenset().union(*(self._attribute(item, node) for item in base))

    def _attribute(self, item: object, node: ast.Attribute) -> Value:
        name = self.function.mangled(node.attr)
        if isinstance(item, Mod):
            return self.module_attribute(item.target, name, self.at(node))
        if isinstance(item, Known):
            if isinstance(item.target, types.ModuleType | type) and hasattr(item.target, name):
                return self.python_value(getattr(item.target, name), name)
            return foreign(f"comes from {name!r}", is_tensor=False)
        if isinstance(item, Fresh):
            if name in catalog.METADATA:
                return NOTHING
            self.use(frozenset({item}), f"is read through .{name} at {self.at(node)}, before the activation")
            return foreign(f"is a view or an attribute (.{name}) of another tensor")
        if isinstance(item, Many | Method):
            self.use(frozenset({item}), "")
        return foreign(f"comes from .{name}, which is not followed", getattr(item, "is_tensor", True))

    def module_attribute(self, module: nn.Module, name: str, where: str) -> Value:
        """What ``module.name`` gives, where ``module`` is one of the model."""
        if module in self.reader.site_names and name in ("inplace", "forward", *catalog.TAKES_APART):
            self.reader.refuse(module, f"its attribute {name!r} is used at {where}")
        if name in module._modules:
            child = module._modules[name]
            return frozenset({Mod(child)}) if child is not None else NOTHING
        if name in catalog.TAKES_APART:
            self.reader.expose(module, f"{self.reader.label(module)} is taken apart ({name}) at {where}")
            return foreign("comes from a module taken apart")
        defining = next((cls for cls in type(module).__mro__ if name in vars(cls)), None)
        if name not in vars(module) and defining is not None:
            entry = vars(defining)[name]
            if isinstance(entry, property) and not catalog.is_library(defining):
                self.reader.call_method(module, name)
                return foreign(f"comes from the property {name!r}")
            if isinstance(entry, types.FunctionType) or hasattr(entry, "__wrapped__"):
                return frozenset({Method(Mod(module), name)})
            return self.python_value(getattr(entry, "__func__", entry), name)
        if name in vars(module):
            return self.python_value(vars(module)[name], name)
        return foreign(f"is kept by {self.reader.label(module)} as {name!r}")

    # Operators

    def eval_BinOp(self, node: ast.BinOp) -> Value:  # noqa: N802
        operands = [self.eval(node.left), self.eval(node.right)]
        for operand in operands:
            self.use(operand, f"is read at {self.at(node)}, before the activation", harmless=True)
        if isinstance(node.op, _FRESH_OPERATORS):
            return self.fresh(node)
        return foreign(f"is made by an operator that may save its result for backward ({self.at(node)})")

    def eval_UnaryOp(self, node: ast.UnaryOp) -> Value:  # noqa: N802
        operand = self.eval(node.operand)
        if isinstance(node.op, ast.Not):
            self.look(operand, node)
            return NOTHING
        self.use(operand, f"is read at {self.at(node)}, before the activation")
        return self.fresh(node) if isinstance(node.op, ast.USub) else foreign("is another tensor, perhaps")

    def eval_Compare(self, node: ast.Compare) -> Value:  # noqa: N802
        operands = [self.eval(operand) for operand in (node.left, *node.comparators)]
        if not all(isinstance(operator, ast.Is | ast.IsNot) for operator in node.ops):
            for operand in operands:
                self.look(operand, node)
        return foreign("is a comparison")

    def look(self, value: Value, node: ast.expr) -> None:
        tensors = frozenset(item for item in value if isinstance(item, Fresh))
        self.use(tensors, f"is read at {self.at(node)}, before the activation", harmless=True)

    def eval_BoolOp(self, node: ast.BoolOp) -> Value:  # noqa: N802
        value = self.eval(node.values[0])
        for operand in node.values[1:]:
            self.look(value, node)
            skipped = self.now.copy()
            value |= self.eval(operand)
            self.now.absorb(skipped)
        return value

    def eval_IfExp(self, node: ast.IfExp) -> Value:  # noqa: N802
        self.look(self.eval(node.test), node)
        before = self.now.copy()
        value = self.eval(node.body)
        after_body, self.state = self.state, before
        value |= self.eval(node.orelse)
        self.state = join([after_body, self.state])
        return value

    def eval_NamedExpr(self, node: ast.NamedExpr) -> Value:  # noqa: N802
        value = self.eval(node.value)
        self.bind(node.target, value)
        return value

    def bind(self, target: ast.expr, value: Value) -> None:
        raise NotImplementedError

    # Containers

    def _display(self, node: ast.Tuple | ast.List | ast.Set) -> Value:
        values = [self.eval(part) for part in node.elts]
        for value in values:
            self.use(value, f"is put in a {type(node).__name__.lower()} at {self.at(node)}")
        return foreign(f"is an element of a {type(node).__name__.lower()}", is_tensor=False)

    eval_Tuple = eval_List = eval_Set = _display  # noqa: N815

    def eval_Dict(self, node: ast.Dict) -> Value:  # noqa: N802
        for part in [*node.keys, *node.values]:
            if part is not None:
                self.use(self.eval(part), f"is put in a dict at {self.at(node)}")
        return foreign("is an element of a dict", is_tensor=False)

    def eval_Starred(self, node: ast.Starred) -> Value:  # noqa: N802
        value = self.eval(node.value)
        self.use(value, f"is unpacked at {self.at(node)}")
        return self.elements(value, node)

    def eval_JoinedStr(self, node: ast.JoinedStr) -> Value:  # noqa: N802
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                self.look(self.eval(part.value), node)
        return NOTHING

    def eval_Slice(self, node: ast.Slice) -> Value:  # noqa: N802
        for part in (node.lower, node.upper, node.step):
            if part is not None:
                self.look(self.eval(part), part)
        return NOTHING

    def eval_Subscript(self, node: ast.Subscript) -> Value:  # noqa: N802
        base = self.eval(node.value)
        self.use(self.eval(node.slice), f"is read at {self.at(node)}", harmless=True)
        modules = frozenset(item for item in base if isinstance(item, Mod | Many))
        self.use(base - modules, f"is read through a view at {self.at(node)}, before the activation")
        result: Value = foreign("is a view or an element of something else") if base - modules else NOTHING
        for item in modules:
            result |= self._child(item, node)
        return result

    def _child(self, item: Mod | Many, node: ast.Subscript) -> Value:
        if isinstance(item, Mod) and isinstance(item.target, nn.ModuleList | nn.Sequential | nn.ModuleDict):
            index = node.slice
            if isinstance(index, ast.Constant) and isinstance(index.value, int | str):
                try:
                    return frozenset({Mod(item.target[index.value])})  # type: ignore[index]
                except (KeyError, IndexError, TypeError):
                    return NOTHING
            if isinstance(index, ast.Slice) and isinstance(item.target, nn.ModuleList):
                return frozenset({Many(self._children(item.target))})
            if not isinstance(index, ast.Slice):
                return self._children(item.target)
        elif isinstance(item, Many):
            return frozenset({item}) if isinstance(node.slice, ast.Slice) else item.modules
        self.use(frozenset({item}), f"is taken apart at {self.at(node)}")
        return foreign("comes from a module taken apart")

    @staticmethod
    def _children(module: nn.Module) -> frozenset[Mod]:
        return frozenset(Mod(child) for child in module._modules.values() if child is not None)

    @staticmethod
    def is_container(item: Mod) -> bool:
        return isinstance(item.target, _CONTAINERS)

    def elements(self, value: Value, node: ast.AST) -> Value:
        """What iterating over ``value`` gives, one of the elements at a time."""
        result: set[Any] = set()
        for item in value:
            if isinstance(item, Many):
                result |= {*item.modules, Foreign("is an element of something else", is_tensor=False)}
            elif isinstance(item, Mod) and self.is_container(item):
                result |= self._children(item.target)
            elif isinstance(item, Mod):
                self.use(frozenset({item}), f"is iterated over at {self.at(node)}")
            else:
                result.add(Foreign("is an element of something else", getattr(item, "is_tensor", True)))
        return frozenset(result)

    def fresh(self, node: ast.AST, origins: frozenset[Mod] = frozenset()) -> Value:
        return frozenset({self.now.create(node, Facts(origins=origins))})
