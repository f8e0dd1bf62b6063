"""Reads one function statement by statement, on every path at once."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lightning_accel.techniques.inplace_activations.calls import Calls
from lightning_accel.techniques.inplace_activations.source import UnreadableError
from lightning_accel.techniques.inplace_activations.values import (
    Facts,
    Foreign,
    Fresh,
    Mod,
    State,
    Value,
    foreign,
    join_statements,
)

_MAX_TURNS = 60  # a loop's state settles after a few; this is only a guard


@dataclass
class _Loop:
    breaks: list[State | None] = field(default_factory=list)
    continues: list[State | None] = field(default_factory=list)


class Interpreter(Calls):
    """Abstract interpretation of the statements of one function.

    ``self.state`` is None where the code cannot be reached.
    """

    def run(self) -> None:
        """Reads the whole function.

        Raises:
            UnreadableError: It holds something that this reader does not understand.
        """
        arguments = self.function.tree.args
        positional = [*arguments.posonlyargs, *arguments.args]
        if not positional:
            raise UnreadableError("has no self")
        self._check_assignments(positional[0].arg)
        self.state = State()
        others = [*positional[1:], *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
        for argument in others:
            if argument is not None:
                self.now.names[argument.arg] = foreign(
                    f"is the caller's: {argument.arg!r} is an argument of {self.function.qualname}"
                )
        self.now.names[positional[0].arg] = frozenset({Mod(self.module)})
        self.block(self.function.tree.body)

    def _check_assignments(self, self_name: str) -> None:
        for node in ast.walk(self.function.tree):
            if isinstance(node, ast.Global | ast.Nonlocal):
                raise UnreadableError(f"uses {type(node).__name__.lower()} {', '.join(node.names)}")
            if isinstance(node, ast.Name) and node.id == self_name and not isinstance(node.ctx, ast.Load):
                raise UnreadableError(f"rebinds {self_name}")

    def block(self, statements: Sequence[ast.stmt]) -> None:
        for statement in statements:
            if self.state is None:
                return
            method = getattr(self, f"do_{type(statement).__name__}", None)
            if method is None:
                raise UnreadableError(f"has a {type(statement).__name__.lower()} statement ({self.at(statement)})")
            method(statement)

    # Simple statements

    def do_Expr(self, node: ast.Expr) -> None:  # noqa: N802
        self.eval(node.value)

    def do_Pass(self, node: ast.Pass) -> None:  # noqa: N802
        pass

    def do_Import(self, node: ast.Import | ast.ImportFrom) -> None:  # noqa: N802
        for alias in node.names:
            self.now.names[alias.asname or alias.name.partition(".")[0]] = foreign(
                "comes from a local import", is_tensor=False
            )

    do_ImportFrom = do_Import  # noqa: N815

    def do_Assign(self, node: ast.Assign) -> None:  # noqa: N802
        if isinstance(node.value, ast.IfExp):
            choice = node.value
            self._choose(choice, [ast.copy_location(ast.Assign(node.targets, part), part) for part in _arms(choice)])
            return
        if len(node.targets) == 1 and _same_length(node.targets[0], node.value):
            targets, parts = node.targets[0].elts, node.value.elts  # type: ignore[attr-defined]
            for target, value in zip(targets, [self.eval(part) for part in parts], strict=True):
                self.bind(target, value)
            return
        value = self.eval(node.value)
        for target in node.targets:
            self.bind(target, value)

    def do_AnnAssign(self, node: ast.AnnAssign) -> None:  # noqa: N802
        if node.value is not None:
            self.bind(node.target, self.eval(node.value))

    def do_AugAssign(self, node: ast.AugAssign) -> None:  # noqa: N802
        if not isinstance(node.target, ast.Name):
            self.use(self.eval(node.value), f"is kept at {self.at(node)}")
            self.write_into(node.target, node)
            return
        before = self.eval_name(node.target.id)
        self.use(self.eval(node.value), f"is read at {self.at(node)}, before the activation", harmless=True)
        self.use(before, None)
        self.mutate(before, self.at(node))
        plain = isinstance(node.op, ast.Add | ast.Sub | ast.Mult)
        after: Value = frozenset(
            item for item in before if isinstance(item, Foreign) or (plain and isinstance(item, Fresh))
        )
        if not any(isinstance(item, Fresh) for item in after):  # a number so far: a new tensor, perhaps
            after |= {self.now.create(node, Facts())}
        if not plain:
            self.use(before, f"is read at {self.at(node)}")
            after |= foreign(f"is made by an assignment in place ({self.at(node)})")
        self.bind(node.target, after)

    def do_Return(self, node: ast.Return) -> None:  # noqa: N802
        if isinstance(node.value, ast.IfExp):
            self._choose(node.value, [ast.copy_location(ast.Return(part), part) for part in _arms(node.value)])
            return
        if node.value is not None:
            self.returned(self.eval(node.value), self.at(node))
        self.state = None

    def _choose(self, choice: ast.IfExp, arms: Sequence[ast.stmt]) -> None:
        """``x = a if test else b`` is read as the two statements it stands for."""
        self.do_If(ast.copy_location(ast.If(choice.test, [arms[0]], [arms[1]]), choice))

    def do_Raise(self, node: ast.Raise) -> None:  # noqa: N802
        for part in (node.exc, node.cause):
            if part is not None:
                self.use(self.eval(part), f"is read at {self.at(node)}")
        self.state = None

    def do_Assert(self, node: ast.Assert) -> None:  # noqa: N802
        self.look(self.eval(node.test), node.test)
        if node.msg is not None:
            self.eval(node.msg)

    def do_Delete(self, node: ast.Delete) -> None:  # noqa: N802
        for target in node.targets:
            if isinstance(target, ast.Name):
                self.now.names.pop(target.id, None)
            else:
                self.write_into(target, node)

    def do_FunctionDef(self, node: ast.FunctionDef) -> None:  # noqa: N802
        for default in [*node.args.defaults, *node.args.kw_defaults, *node.decorator_list]:
            if default is not None:
                self.use(self.eval(default), f"is kept at {self.at(node)}")
        self.nested(node.args, lambda: self.block(node.body))
        self.now.names[node.name] = foreign("is a nested function", is_tensor=False)

    # Branches and loops

    def do_If(self, node: ast.If) -> None:  # noqa: N802
        self.look(self.eval(node.test), node.test)
        before = self.now.copy()
        self.block(node.body)
        after_body, self.state = self.state, before
        self.block(node.orelse)
        self.state = join_statements([after_body, self.state])

    def do_For(self, node: ast.For) -> None:  # noqa: N802
        bind = self.iteration(node.target, node.iter)
        self._loop(bind, node.body, node.orelse, leaves_before_turn=True)

    def do_While(self, node: ast.While) -> None:  # noqa: N802
        self._loop(lambda: self.look(self.eval(node.test), node.test), node.body, node.orelse, leaves_before_turn=False)

    def _loop(
        self, turn: Callable[[], object], body: list[ast.stmt], orelse: list[ast.stmt], *, leaves_before_turn: bool
    ) -> None:
        head = self.now.copy()
        for _ in range(_MAX_TURNS):
            loop = _Loop()
            self.loops.append(loop)
            self.state = head.copy()
            turn()
            leaving = head if leaves_before_turn else self.now.copy()
            self.block(body)
            self.loops.pop()
            again = join_statements([head, self.state, *loop.continues])
            assert again is not None
            if again == head:
                break
            head = again
        else:
            raise UnreadableError("has a loop that is too tangled to follow")
        self.state = leaving.copy()
        self.block(orelse)
        self.state = join_statements([self.state, *loop.breaks])

    def do_Break(self, node: ast.Break) -> None:  # noqa: N802
        self.loops[-1].breaks.append(self.state)
        self.state = None

    def do_Continue(self, node: ast.Continue) -> None:  # noqa: N802
        self.loops[-1].continues.append(self.state)
        self.state = None

    # What may be left half way

    def do_With(self, node: ast.With) -> None:  # noqa: N802
        swallows = False
        for item in node.items:
            called = item.context_expr.func if isinstance(item.context_expr, ast.Call) else item.context_expr
            swallows |= not self.never_swallows(called)
            self.use(self.eval(item.context_expr), f"is read at {self.at(node)}")
            if item.optional_vars is not None:
                self.bind(item.optional_vars, foreign("comes from a with statement"))
        halfway = self._watched(node.body)
        if swallows:  # it may catch an exception, and go on behind the block
            self.state = join_statements([self.state, halfway])

    def do_Try(self, node: ast.Try) -> None:  # noqa: N802
        if node.finalbody and any(isinstance(inner, ast.Break | ast.Continue) for inner in ast.walk(node)):
            raise UnreadableError(f"leaves a loop through a finally ({self.at(node)})")
        everywhere = self.now.copy()
        self.observers.append(everywhere)
        halfway = self._watched(node.body)
        self.block(node.orelse)
        ends = [self.state]
        for handler in node.handlers:
            self.state = halfway.copy()
            if handler.type is not None:
                self.eval(handler.type)
            if handler.name:
                self.now.names[handler.name] = foreign("is an exception", is_tensor=False)
            self.block(handler.body)
            ends.append(self.state)
        self.observers.pop()
        after = join_statements(ends)
        if node.finalbody:
            self.state = everywhere
            self.block(node.finalbody)
            after = self.state if after is not None else None
        self.state = after

    def _watched(self, body: list[ast.stmt]) -> State:
        """Reads ``body``; returns the state that holds wherever in it an exception may strike."""
        halfway = self.now.copy()
        self.observers.append(halfway)
        self.block(body)
        self.observers.pop()
        return halfway

    # Targets

    def bind(self, target: ast.expr, value: Value) -> None:
        if isinstance(target, ast.Name):
            if target.id in self.function.captured:
                self.use(value, f"is captured by a nested function ({self.at(target)})", keeps_modules=True)
            self.now.names[target.id] = value
            self.changed()
        elif isinstance(target, ast.Tuple | ast.List):
            self.use(value, f"is unpacked at {self.at(target)}", keeps_modules=True)
            # A pair of a name and a module (from named_children(), items()) is the module here.
            modules = frozenset(item for item in value if isinstance(item, Mod))
            containers = frozenset(item for item in modules if self.is_container(item))
            parts = modules | self.elements((value - modules) | containers, target)
            for part in target.elts:
                self.bind(part.value if isinstance(part, ast.Starred) else part, parts)
        else:
            self.use(value, f"is kept at {self.at(target)}")
            self.write_into(target, target)


def _arms(choice: ast.IfExp) -> tuple[ast.expr, ast.expr]:
    return choice.body, choice.orelse


def _same_length(target: ast.expr, value: ast.expr) -> bool:
    sides = (target, value)
    return (
        all(isinstance(side, ast.Tuple | ast.List) for side in sides)
        and len(target.elts) == len(value.elts)  # type: ignore[attr-defined]
        and not any(isinstance(part, ast.Starred) for side in sides for part in side.elts)  # type: ignore[attr-defined]
    )
