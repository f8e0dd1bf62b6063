"""Reads what has a scope of its own: loops over iterables, comprehensions, nested functions."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

from lightning_accel.techniques.inplace_activations.expressions import Expressions
from lightning_accel.techniques.inplace_activations.source import UnreadableError
from lightning_accel.techniques.inplace_activations.values import (
    NOTHING,
    Fresh,
    Many,
    Method,
    Mod,
    State,
    Value,
    foreign,
)


class Scopes(Expressions):
    """Abstract interpretation of expressions that bind names of their own."""

    def iteration(self, target: ast.expr, source: ast.expr) -> Callable[[], None]:
        """Evaluates the iterable of a loop; the result binds the loop's target to an element, once a turn."""
        called = source.func.id if isinstance(source, ast.Call) and isinstance(source.func, ast.Name) else ""
        arguments = source.args if isinstance(source, ast.Call) else []
        parts = target.elts if isinstance(target, ast.Tuple) else []
        if called == "enumerate" and len(parts) == 2 and arguments:
            pairs = [(parts[0], foreign("is an index", is_tensor=False)), (parts[1], self._iterable(arguments[0]))]
        elif (
            called == "zip" and len(parts) == len(arguments) and not any(isinstance(a, ast.Starred) for a in arguments)
        ):
            pairs = [(part, self._iterable(argument)) for part, argument in zip(parts, arguments, strict=True)]
        else:
            pairs = [(target, self._iterable(source))]

        def turn() -> None:
            for part, value in pairs:
                self.bind(part, value)

        return turn

    def _iterable(self, node: ast.expr) -> Value:
        value = self.eval(node)
        tensors = frozenset(item for item in value if isinstance(item, Fresh | Method))
        self.use(tensors, f"is iterated over at {self.at(node)}")
        return self.elements(value, node)

    def _comprehension(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> Value:
        hidden = dict(self.now.names)
        results = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
        for _ in range(2):  # what an earlier turn did is seen by the next
            before = self.now.copy()
            for generator in node.generators:
                if generator.is_async:
                    raise UnreadableError("is asynchronous")
                self.iteration(generator.target, generator.iter)()
                for condition in generator.ifs:
                    self.look(self.eval(condition), condition)
            modules: set[Any] = set()
            for result in results:
                value = self.eval(result)
                modules |= {item for item in value if isinstance(item, Mod)}
                self.use(value, f"is put in a collection at {self.at(node)}", keeps_modules=True)
            self.now.absorb(before)
        bound = {inner.id for g in node.generators for inner in ast.walk(g.target) if isinstance(inner, ast.Name)}
        for name in bound:
            if name in hidden:
                self.now.names[name] = hidden[name]
            else:
                self.now.names.pop(name, None)
        many: Value = frozenset({Many(frozenset(modules))}) if modules else NOTHING
        return many | foreign("is an element of a collection", is_tensor=False)

    eval_ListComp = eval_SetComp = eval_GeneratorExp = eval_DictComp = _comprehension  # noqa: N815

    def eval_Lambda(self, node: ast.Lambda) -> Value:  # noqa: N802
        self.nested(node.args, lambda: self.use(self.eval(node.body), f"is returned at {self.at(node)}"))
        return foreign("is a function", is_tensor=False)

    def nested(self, arguments: ast.arguments, read: Callable[[], object]) -> None:
        """Reads the body of a nested function, which runs at some other time: it owns nothing of what is outside."""
        outside = self.now
        self_name = next(iter([*self.function.tree.args.posonlyargs, *self.function.tree.args.args])).arg
        names = {name: foreign(f"is captured from {self.function.qualname}") for name in outside.names}
        for name, value in outside.names.items():
            if name in self.function.captured and name != self_name:
                self.use(
                    frozenset(item for item in value if isinstance(item, Mod | Many | Method)),
                    "is captured by a function",
                )
        names[self_name] = outside.names.get(self_name, NOTHING)
        for argument in ast.walk(arguments):
            if isinstance(argument, ast.arg):
                names[argument.arg] = foreign(f"is the caller's: {argument.arg!r} is an argument of a nested function")
        loops, self.loops = self.loops, []
        self.state = State(names, {})
        self.depth += 1
        read()
        self.depth -= 1
        self.state, self.loops = outside, loops
