"""The syntax tree of a function, checked against the code that runs."""

from __future__ import annotations

import ast
import builtins
import inspect
import textwrap
import types
from dataclasses import dataclass
from typing import Any


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_DECORATORS = _words(
    """
    no_grad inference_mode enable_grad set_grad_enabled autocast override abstractmethod property staticmethod
    classmethod unused ignore export cached_property final no_type_check
    """
)


class UnreadableError(Exception):
    """The reason why a function cannot be analysed, in words that follow "…forward"."""


@dataclass(frozen=True, eq=False)
class Function:
    """One function of one class.

    Attributes:
        owner: The class whose body defines it.
        function: The plain function, without its decorators.
        tree: Its syntax tree; line numbers are those of the file.
        captured: Names that nested functions read: they may do so at any later time.
    """

    owner: type
    function: types.FunctionType
    tree: ast.FunctionDef
    captured: frozenset[str]

    @property
    def code(self) -> types.CodeType:
        return self.function.__code__

    @property
    def qualname(self) -> str:
        return (
            self.function.__qualname__.replace("<locals>.", "").rpartition(".")[0].rpartition(".")[2]
            + "."
            + self.tree.name
        )

    def mangled(self, name: str) -> str:
        """``__name`` as the class body spells it."""
        if name.startswith("__") and not name.endswith("__"):
            return f"_{self.owner.__name__.lstrip('_')}{name}"
        return name

    def outer(self, name: str) -> Any:
        """What a name that is not local stands for. Raises ``KeyError`` when nothing is found."""
        if name in self.code.co_freevars and self.function.__closure__:
            cell = self.function.__closure__[self.code.co_freevars.index(name)]
            try:
                return cell.cell_contents
            except ValueError:
                raise KeyError(name) from None
        if name in self.function.__globals__:
            return self.function.__globals__[name]
        return vars(builtins)[name]


def read(owner: type, name: str) -> Function:
    """Reads the method ``name`` that ``owner`` defines.

    Raises:
        UnreadableError: There is no source, or it is not (only) what runs.
    """
    entry = vars(owner)[name]
    entry = entry.fget if isinstance(entry, property) else getattr(entry, "func", entry)
    entry = getattr(entry, "__func__", entry)
    function = inspect.unwrap(entry) if callable(entry) else None
    if not isinstance(function, types.FunctionType):
        raise UnreadableError("is not written in Python")
    tree = _parse(owner, function)
    for decorator in tree.decorator_list:
        called = decorator.func if isinstance(decorator, ast.Call) else decorator
        label = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "?")
        if label not in _DECORATORS and label not in ("setter", "getter", "_overload_method"):
            raise UnreadableError(f"is decorated with @{label}")
    if function is not entry and not tree.decorator_list:
        raise UnreadableError("was wrapped by another function")
    _check_same(owner, function, tree)
    return Function(owner, function, tree, _captured(tree))


def _parse(owner: type, function: types.FunctionType) -> ast.FunctionDef:
    try:
        lines, first = inspect.getsourcelines(function)
        module = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError, IndentationError):
        raise UnreadableError("has no source to read") from None
    tree = module.body[0] if module.body else None
    if not isinstance(tree, ast.FunctionDef):
        raise UnreadableError("is not a plain function")
    ast.increment_lineno(tree, max(first, 1) - 1)
    return tree


def _check_same(owner: type, function: types.FunctionType, tree: ast.FunctionDef) -> None:
    """A file edited after its import, or a source that a tool made up, does not describe the code that runs."""
    bare = ast.FunctionDef(
        **{**{name: getattr(tree, name) for name in tree._fields}, "decorator_list": [], "returns": None}
    )
    shell = ast.ClassDef(name=owner.__name__, bases=[], keywords=[], body=[bare], decorator_list=[])
    if "type_params" in ast.ClassDef._fields:
        setattr(shell, "type_params", [])  # noqa: B010
    module = ast.fix_missing_locations(ast.Module(body=[shell], type_ignores=[]))
    try:
        (inner,) = _codes(compile(module, "<source>", "exec", dont_inherit=True))
    except SyntaxError:  # `nonlocal` names a variable of the function around it
        raise UnreadableError("cannot be compiled by itself") from None
    compiled = next((code for code in _codes(inner) if code.co_name == function.__name__), None)
    names = set(function.__code__.co_names) | set(function.__code__.co_freevars)
    if (
        compiled is None
        or compiled.co_varnames != function.__code__.co_varnames
        or set(compiled.co_names) | set(compiled.co_freevars) != names
    ):
        raise UnreadableError("does not match its source")


def _codes(code: types.CodeType) -> list[types.CodeType]:
    return [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]


def nested_codes(code: types.CodeType) -> list[types.CodeType]:
    """``code`` and the code of every function, lambda and comprehension in it."""
    return [code, *(inner for constant in _codes(code) for inner in nested_codes(constant))]


def _captured(tree: ast.FunctionDef) -> frozenset[str]:
    nested = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.Lambda | ast.GeneratorExp | ast.ClassDef) and node is not tree
    ]
    return frozenset(
        inner.id
        for node in nested
        for inner in ast.walk(node)
        if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Load)
    )
