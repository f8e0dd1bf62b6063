"""The library's source as a graph: which file imports which, and which names of other libraries it uses."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Import:
    """One import statement's arrow.

    Attributes:
        file: Where it stands.
        line: At which line.
        module: What it names, as it names it: ``torch.nn``, ``lightning_accel.core.patch``.
        name: What ``from … import`` takes out of it; empty for a plain import.
        target: The file of the library that it leads to; empty for another library's.
    """

    file: str
    line: int
    module: str
    name: str
    target: str


@dataclass(frozen=True)
class PrivateName:
    """One use of a name with a leading underscore: ``torch._C._version``, ``"_parameters"``."""

    file: str
    line: int
    name: str


@dataclass(frozen=True)
class SourceTree:
    """Parsed files of the library, by their paths in it.

    Attributes:
        sources: Path → text, such as ``{"core/tree.py": "..."}``.
        known: Private names of other libraries' objects that the library's own attributes may be mistaken for.
    """

    sources: Mapping[str, str]
    known: frozenset[str] = field(default=frozenset())

    @cached_property
    def trees(self) -> dict[str, ast.Module]:
        return {file: ast.parse(text, file) for file, text in self.sources.items()}

    @cached_property
    def imports(self) -> list[Import]:
        """Every arrow: at the top of a file, under ``TYPE_CHECKING`` and inside functions alike."""
        return [found for file, tree in self.trees.items() for found in self._imports_of(file, tree)]

    @cached_property
    def arrows(self) -> dict[str, set[str]]:
        """For every file, those that it imports."""
        arrows: dict[str, set[str]] = {file: set() for file in self.trees}
        for found in self.imports:
            if found.target and found.target != found.file:
                arrows[found.file].add(found.target)
        return arrows

    def private_names(self) -> Iterator[PrivateName]:
        """Uses of names with a leading underscore that are another library's, each once a file."""
        for file, tree in self.trees.items():
            seen = set()
            for node, name in sorted(self._private_in(file, tree), key=lambda pair: pair[0].lineno):
                if name not in seen:
                    seen.add(name)
                    yield PrivateName(file, node.lineno, name)

    def _imports_of(self, file: str, tree: ast.Module) -> Iterator[Import]:
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield Import(file, node.lineno, alias.name, "", self._file_of(alias.name))
            elif isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    target = self._file_of(f"{node.module}.{alias.name}") or self._file_of(node.module)
                    yield Import(file, node.lineno, node.module, alias.name, target)

    def _file_of(self, module: str) -> str:
        package, _, rest = module.partition(".")
        if package != "lightning_accel":
            return ""
        path = rest.replace(".", "/")
        names = (f"{path}.py", f"{path}/__init__.py" if path else "__init__.py")
        return next((name for name in names if name in self.sources), "")

    @cached_property
    def _defined(self) -> dict[str, set[str]]:
        return {file: _names_defined(tree) for file, tree in self.trees.items()}

    @cached_property
    def _own(self) -> set[str]:
        return set().union(*self._defined.values())

    def _private_in(self, file: str, tree: ast.Module) -> Iterator[tuple[ast.stmt | ast.expr, str]]:
        inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        affixes = {id(argument) for node in ast.walk(tree) for argument in _affixes(node)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and id(node) not in inner:
                if any(self._is_foreign(file, part) for part in _attributes(node)):
                    yield node, _dotted(node)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in affixes:
                parts = node.value.split(".")  # an attribute for getattr, or a module for import_module
                if all(map(str.isidentifier, parts)) and any(self._is_foreign_name(file, part) for part in parts):
                    yield node, f'"{node.value}"'
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    if any(map(_is_private, alias.name.split("."))):
                        yield node, alias.name
            elif isinstance(node, ast.ImportFrom) and node.module and not node.module.startswith("lightning_accel"):
                for alias in node.names:
                    if any(map(_is_private, (*node.module.split("."), alias.name))):
                        yield node, f"{node.module}.{alias.name}"

    def _is_foreign(self, file: str, node: ast.Attribute) -> bool:
        if _is_self(node.value):
            return _is_private(node.attr) and node.attr not in self._own
        return self._is_foreign_name(file, node.attr)

    def _is_foreign_name(self, file: str, name: str) -> bool:
        is_own = name in self._defined[file] or (name in self._own and name not in self.known)
        return _is_private(name) and not is_own


@cache
def library() -> SourceTree:
    """This checkout's library, the callbacks among it, where they are when it is installed."""
    folders = {"": ROOT / "lightning_accel", "callbacks/": ROOT / "callbacks"}
    sources = {
        f"{prefix}{path.relative_to(folder).as_posix()}": path.read_text(encoding="utf-8")
        for prefix, folder in folders.items()
        for path in sorted(folder.rglob("*.py"))
    }
    return SourceTree(sources, _names_of_others())


def circles(arrows: Mapping[str, set[str]]) -> list[list[str]]:
    """Groups of nodes that can all reach each other, each sorted: the strongly connected components beyond one node."""
    reach = {node: _reachable(node, arrows) for node in arrows}
    groups = {tuple(sorted(other for other in reach[node] if node in reach[other])) for node in arrows}
    return sorted(list(group) for group in groups if group)


def _reachable(start: str, arrows: Mapping[str, set[str]]) -> set[str]:
    found: set[str] = set()
    waiting = [start]
    while waiting:
        new = arrows.get(waiting.pop(), set()) - found
        found |= new
        waiting += new
    return found


# Documented parts of Python whose names begin with an underscore.
_PUBLIC = {"_", "_getframe", "_exit", "_is_gil_enabled", "_fields", "_fields_", "_replace", "_asdict", "_make"}
_OURS = ("_accel_", "_lightning_accel")


def _is_private(name: str) -> bool:
    is_dunder = name.startswith("__") and name.endswith("__")
    return name.startswith("_") and not is_dunder and name not in _PUBLIC and not name.startswith(_OURS)


def _affixes(node: ast.AST) -> list[ast.expr]:
    """What a text is asked to begin or to end with, which is part of a name and none by itself."""
    is_asked = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    return node.args if is_asked and node.func.attr in ("startswith", "endswith") else []


def _is_self(node: ast.expr) -> bool:
    is_super = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"
    return is_super or (isinstance(node, ast.Name) and node.id in ("self", "cls"))


def _names_defined(tree: ast.Module) -> set[str]:
    """Functions, classes, variables and attributes of ``self`` that a file defines, and what it imports by name."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    # A function within a function may be a method's substitute, by whose name it goes.
    inner = {id(node) for function in functions for node in ast.walk(function) if node is not function}
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names |= set() if id(node) in inner else {node.name}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
            names.add(node.attr)
        elif isinstance(node, ast.alias):
            names.add(node.asname or "")
    return names


def _attributes(node: ast.Attribute) -> Iterator[ast.Attribute]:
    inner: ast.expr = node
    while isinstance(inner, ast.Attribute):
        yield inner
        inner = inner.value


def _dotted(node: ast.Attribute) -> str:
    """``torch._C.x`` for an attribute of a module; only what is looked up for one of an object: ``._version``."""
    names = [part.attr for part in _attributes(node)][::-1]
    first = list(_attributes(node))[-1].value
    is_module = isinstance(first, ast.Name) and first.id in ("torch", "dist", "lightning", "transformers")
    if is_module:
        assert isinstance(first, ast.Name)
        return ".".join([first.id, *names])
    return "." + ".".join(name for name in names if _is_private(name))


def _names_of_others() -> frozenset[str]:
    import torch
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.utilities import CombinedLoader

    objects = (
        *(torch, torch.nn.Module(), torch.nn.Conv2d, torch.nn.LSTM, torch.nn.parallel.DistributedDataParallel),
        *(torch.zeros(1), torch.zeros(1).untyped_storage(), torch.autograd.Function, torch.optim.Optimizer),
        *(LightningModule(), Trainer, CombinedLoader([])),
    )
    return frozenset(name for item in objects for name in dir(item) if _is_private(name))
