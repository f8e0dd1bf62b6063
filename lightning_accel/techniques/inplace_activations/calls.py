"""Reads calls: of modules, of methods, of PyTorch's functions, of anything else."""

from __future__ import annotations

import ast
import contextlib
from typing import Any

import torch.utils.checkpoint
from torch import nn

from lightning_accel.techniques.inplace_activations import catalog
from lightning_accel.techniques.inplace_activations.scopes import Scopes
from lightning_accel.techniques.inplace_activations.source import UnreadableError
from lightning_accel.techniques.inplace_activations.values import (
    NOTHING,
    Foreign,
    Fresh,
    Known,
    Many,
    Method,
    Mod,
    State,
    Value,
    foreign,
    join,
)

_LOOKING = (isinstance, issubclass, hasattr, len, type, id, callable, print, repr, str, bool)
_ITERATING = (list, tuple, iter, reversed, enumerate, zip, sorted, next, filter)
_FORBIDDEN = (locals, globals, vars, eval, exec, dir, setattr, delattr)


class Calls(Scopes):
    """Abstract interpretation of call expressions."""

    def eval_Call(self, node: ast.Call) -> Value:  # noqa: N802
        if isinstance(node.func, ast.Attribute):
            if _is_super(node.func.value):
                return self._call_super(node, node.func.attr)
            base = self.eval(node.func.value)
            callees: list[Any] = [(item, node.func) for item in base]
        else:
            callees = [(item, None) for item in self.eval(node.func)]
        arguments = [self.eval(argument) for argument in node.args]
        keywords = {keyword.arg or "**": self.eval(keyword.value) for keyword in node.keywords}
        if not callees:
            self._use_all([*arguments, *keywords.values()], f"is read at {self.at(node)}")
            return foreign("comes from a call that is not followed")
        # Alternatives: what one callee does is not seen by another.
        before, result = self.now, NOTHING
        after: list[State | None] = []
        for item, attribute in callees:
            self.state = before.copy()
            if attribute is None:
                result |= self._call(item, node, arguments, keywords)
            else:
                result |= self._call_attribute(item, attribute, node, arguments, keywords)
            after.append(self.state)
        self.state = join(after)
        return result

    def _call_super(self, node: ast.Call, name: str) -> Value:
        self._use_all(self._arguments(node), f"is handed to super().{name}() at {self.at(node)}")
        mro = type(self.module).__mro__
        for cls in mro[mro.index(self.function.owner) + 1 :]:
            if name in vars(cls):
                if catalog.is_library(cls) or name in catalog.SETUP_METHODS:
                    break
                reason, origins = self.reader.call_method(self.module, name, cls)
                return foreign(reason) if reason is not None else self.fresh(node, origins)
        return foreign(f"comes from super().{name}()")

    def _arguments(self, node: ast.Call) -> list[Value]:
        return [self.eval(argument) for argument in (*node.args, *(keyword.value for keyword in node.keywords))]

    def _call_attribute(
        self, item: object, attribute: ast.Attribute, node: ast.Call, arguments: list[Value], keywords: dict[str, Value]
    ) -> Value:
        """``item.name(...)``."""
        name = self.function.mangled(attribute.attr)
        where = self.at(node)
        everything = [*arguments, *keywords.values()]
        if isinstance(item, Mod):
            found = self._call_on_module(item.target, name, where, everything)
            if found is not None:
                return found
        if isinstance(item, Mod | Known):
            result: Value = NOTHING
            for callee in self._attribute(item, attribute):
                if name == "forward" and isinstance(callee, Method):
                    callee = item
                result |= self._call(callee, node, arguments, keywords)
            return result
        harmless = name in catalog.FRESH_METHODS
        self._use_all(everything, f"is read by .{name}() at {where}, before the activation", harmless=harmless)
        if isinstance(item, Fresh):
            return self._call_on_tensor(item, name, node)
        if isinstance(item, Foreign):
            if name.endswith("_") and not name.startswith("_"):
                self.mutate(frozenset({item}), where)
            if name == "clone":
                return self.fresh(node)
            return foreign(f"comes from .{name}(), which is not known to give a fresh tensor", True)
        return frozenset({item}) if isinstance(item, Many) else foreign(f"comes from .{name}()")

    def _call_on_module(self, module: nn.Module, name: str, where: str, everything: list[Value]) -> Value | None:
        if name in catalog.HANDS_OUT or (name in ("values", "items") and isinstance(module, nn.ModuleDict)):
            self._use_all(everything, f"is read at {where}")
            found = module.modules() if name.endswith("modules") else module.children()
            return frozenset({Many(frozenset(Mod(child) for child in found))})
        return None

    def _call_on_tensor(self, tensor: Fresh, name: str, node: ast.Call) -> Value:
        value: Value = frozenset({tensor})
        if name in catalog.METADATA:
            return NOTHING
        if name in catalog.FRESH_METHODS:
            self.use(value, f"is read by .{name}() at {self.at(node)}, before the activation", harmless=True)
            return self.fresh(node)
        if name.endswith("_") and not name.startswith("_"):
            self.mutate(value, self.at(node))
            if name in catalog.SELF_METHODS:
                self.use(value, None)
                return value
        self.use(value, f"is read by .{name}() at {self.at(node)}, before the activation")
        return foreign(f"comes from .{name}(), which is not known to give a fresh tensor")

    def _call(self, item: object, node: ast.Call, arguments: list[Value], keywords: dict[str, Value]) -> Value:
        where = self.at(node)
        everything = [*arguments, *keywords.values()]
        if isinstance(item, Mod):
            if any(isinstance(argument, ast.Starred) for argument in node.args):
                arguments = [frozenset().union(*arguments)] * 2
            if keywords:
                self._use_all(list(keywords.values()), f"is read by {self.reader.label(item.target)} at {where}")
            return self.call_module(item.target, arguments, bool(keywords), node, where)
        if isinstance(item, Method):
            self._use_all(everything, f"is handed to .{item.name}() at {where}")
            reason, origins = self.reader.call_method(item.module.target, item.name)
            return foreign(reason) if reason is not None else self.fresh(node, origins)
        if isinstance(item, Known):
            return self._call_known(item.target, node, arguments, keywords)
        self._use_all(everything, f"is read at {where}, before the activation")
        if isinstance(item, Many):
            self.use(frozenset({item}), "is called")
        return foreign(f"comes from {ast.unparse(node.func)}(), which is not followed")

    def _call_known(self, function: Any, node: ast.Call, arguments: list[Value], keywords: dict[str, Value]) -> Value:
        where = self.at(node)
        everything = [*arguments, *keywords.values()]
        name = getattr(function, "__name__", "a function")
        if function in _FORBIDDEN:
            raise UnreadableError(f"uses {name}()")
        if function is getattr:
            return self._call_getattr(node, arguments)
        if function in _LOOKING:
            for argument in everything:
                tensors = frozenset(item for item in argument if isinstance(item, Fresh))
                if function not in (isinstance, hasattr, len, type, id, callable):
                    self.use(tensors, f"is read by {name}() at {where}")
                elif any(tensors):
                    continue
            return NOTHING
        if function in _ITERATING:
            modules = frozenset(item for value in everything for item in value if isinstance(item, Mod | Many))
            for argument in everything:
                self.use(argument, f"is read by {name}() at {where}", keeps_modules=True)
            inside = self.elements(modules, node)
            many = frozenset(item for item in inside if isinstance(item, Mod))
            rest = foreign("is an element of something else", is_tensor=bool(not many))
            return (frozenset({Many(many)}) if many else NOTHING) | rest
        if function is torch.utils.checkpoint.checkpoint and arguments:
            return self._call_checkpoint(node, arguments, keywords)
        constants = {kw.arg or "**": getattr(kw.value, "value", None) for kw in node.keywords}
        if self._is_tensor_function(function) and catalog.overwrites(function, constants, len(arguments)):
            for argument in everything:
                self.mutate(argument, where)
            self._use_all(everything, f"is overwritten by {name}() at {where}")
            return foreign(f"comes from {name}() in place")
        fresh = _in(function, catalog.FRESH_FUNCTIONS) and "return_indices" not in keywords
        saved = catalog.saves_its_result(function)
        self._use_all(everything, f"is read by {name}() at {where}, before the activation", harmless=fresh or saved)
        if fresh:
            return self.fresh(node)
        if saved:
            return foreign(f"is saved for the backward pass by {name}()")
        return foreign(f"comes from {name}(), which is not known to give a fresh tensor")

    @staticmethod
    def _is_tensor_function(function: Any) -> bool:
        module = str(getattr(function, "__module__", None) or "torch")
        return module.startswith(("torch", "_VF")) and not isinstance(function, type)

    def _call_getattr(self, node: ast.Call, arguments: list[Value]) -> Value:
        base, name = arguments[0], node.args[1] if len(node.args) > 1 else None
        default = arguments[2] if len(arguments) > 2 else NOTHING
        if isinstance(name, ast.Constant) and isinstance(name.value, str):
            attribute = ast.Attribute(value=node.args[0], attr=name.value, ctx=ast.Load(), lineno=node.lineno)
            return default.union(*(self._attribute(item, attribute) for item in base))
        result: Value = default | foreign("comes from getattr() with a name that is not constant")
        for item in base:
            if isinstance(item, Mod):  # any child, or any method
                result |= self._children(item.target)
                self.reader.call_every_method(item.target)
            else:
                self.use(frozenset({item}), f"is read by getattr() at {self.at(node)}")
        return result

    def _call_checkpoint(self, node: ast.Call, arguments: list[Value], keywords: dict[str, Value]) -> Value:
        """``checkpoint(module, ...)`` calls the module, and again during the backward pass."""
        self._use_all([*arguments[1:], *keywords.values()], f"is saved by checkpoint() at {self.at(node)}")
        for item in arguments[0]:
            if isinstance(item, Mod) and item.target in self.reader.site_names:
                self.reader.refuse(item.target, f"it is checkpointed at {self.at(node)}")
            elif not isinstance(item, Mod):
                self.use(frozenset({item}), f"is checkpointed at {self.at(node)}")
        return foreign("comes from checkpoint()")

    # What assignments and with statements need

    def write_into(self, target: ast.AST, node: ast.AST) -> None:
        """Something is stored in (or deleted from) an attribute or an element."""
        if isinstance(target, ast.Attribute):
            name = self.function.mangled(target.attr)
            for item in self.eval(target.value):
                if isinstance(item, Mod):
                    self._store_on_module(item.target, name, node)
                else:
                    self.use(frozenset({item}), f"is written to at {self.at(node)}")
        elif isinstance(target, ast.Subscript):
            base = self.eval(target.value)
            self.use(self.eval(target.slice), f"is read at {self.at(node)}")
            self.mutate(base, self.at(node))
            self.use(base, f"is written to at {self.at(node)}")
        else:
            raise UnreadableError(f"assigns to something unusual ({self.at(node)})")

    def _store_on_module(self, module: nn.Module, name: str, node: ast.AST) -> None:
        if name in module._modules or name in ("forward", "inplace") or module in self.reader.site_names:
            self.reader.expose(module, f"{name!r} is replaced at {self.at(node)}")
        elif isinstance(node, ast.AugAssign) and not isinstance(getattr(module, name, 0), int | float):
            self.mutate(foreign("is kept"), self.at(node))

    def never_swallows(self, node: ast.expr) -> bool:
        """Whether a ``with`` over (a call of) ``node`` is known to let exceptions pass."""
        if not isinstance(node, ast.Name | ast.Attribute):
            return False
        state = self.now.copy()
        items = self.eval(node)
        self.state = state
        return bool(items) and all(isinstance(item, Known) and _is_plain_context(item.target) for item in items)


def _is_plain_context(target: Any) -> bool:
    return target is contextlib.nullcontext or str(getattr(target, "__module__", "")).startswith("torch.")


def _is_super(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"


def _in(function: Any, known: frozenset[Any]) -> bool:
    try:
        return function in known
    except TypeError:
        return False
