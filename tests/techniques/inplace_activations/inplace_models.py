"""Small models in many writing styles: which of their activations may overwrite their input, and which must not.

Each says so itself: ``applied`` names the sites that must be found, all others must be refused. ``others`` are
configurations of the forward that are not those of the step that is watched.
"""

from __future__ import annotations

import contextlib
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Model(nn.Module):
    applied: ClassVar[set[str]] = set()
    others: ClassVar[tuple[dict[str, Any], ...]] = ()

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.b = nn.Linear(8, 8)
        self.act = nn.ReLU()


class Temporary(Model):
    applied = {"act"}

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.act(self.a(x)))


class SameName(Model):
    applied = {"act"}

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        x = self.act(x)
        return self.b(x) + x


class SharedAndSafe(Model):
    applied = {"act"}

    def forward(self, x: Tensor) -> Tensor:
        out = self.act(self.a(x))
        out = self.b(out)
        out += x
        return self.act(out)


class SharedOnceUnsafe(Model):
    def forward(self, x: Tensor) -> Tensor:
        out = self.act(self.a(x))
        y = self.b(out)
        return self.act(y) + y


class ReadAgain(Model):
    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        y = self.act(x)
        return x + y


class ReadInTheSameExpression(Model):
    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        return x + self.act(x)


class ReadThroughView(Model):
    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        rows = x.view(-1)
        y = self.act(x)
        return y.view(-1) + rows


class ReadThroughViewOfTheResultOnly(Model):
    applied = {"act"}

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        return self.act(x)[:, :4] * 2


class InputIsAView(Model):
    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        return self.act(x[:, :4]) + x[:, 4:]


class KeptOnSelf(Model):
    def forward(self, x: Tensor) -> Tensor:
        self.last = h = self.a(x)
        h = self.act(h)
        return h + self.last


class KeptInAList(Model):
    def forward(self, x: Tensor) -> Tensor:
        seen = []
        h = self.a(x)
        seen.append(h)
        h = self.act(h)
        return h + seen[0]


class KeptInADict(Model):
    def forward(self, x: Tensor) -> Tensor:
        seen = {}
        h = self.a(x)
        seen["h"] = h
        return self.act(h) + seen["h"]


class KeptAsAttributeOfAnObject(Model):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        y = self.act(h)
        y.before = h
        return y + y.before


class ReadOnABranch(Model):
    others = ({"skip": True},)

    def forward(self, x: Tensor, skip: bool = False) -> Tensor:
        h = self.a(x)
        y = self.act(h)
        if skip:
            y = y + h
        return y


class ReadInEvaluation(Model):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        y = self.act(h)
        return y if self.training else y + h


class ReadInAConditionalExpression(Model):
    others = ({"skip": True},)

    def forward(self, x: Tensor, skip: bool = False) -> Tensor:
        h = self.a(x)
        y = self.act(h)
        return y + (h if skip else y)


class CalledInAConditionalExpression(Model):
    applied = {"act"}
    others = ({"on": False},)

    def forward(self, x: Tensor, on: bool = True) -> Tensor:
        h = self.a(x)
        h = self.act(h) if on else h
        return self.b(h)


class ConditionalArgument(Model):
    others = ({"own": False},)

    def forward(self, x: Tensor, own: bool = True) -> Tensor:
        return self.act(self.a(x) if own else x) + x


class TheCallers(Model):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(self.act(x)) + x


class TheCallersByDefault(Model):
    others = ({"plain": True},)

    def forward(self, x: Tensor, plain: bool = False) -> Tensor:
        h = x
        if not plain:
            h = self.a(x)
        return self.act(h) + x


class Alias(Model):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        keep = h
        h = self.act(h)
        return h + keep


class ChainedAssignment(Model):
    def forward(self, x: Tensor) -> Tensor:
        h = keep = self.a(x)
        h = self.act(h)
        return h + keep


class ChainedAssignmentUnread(Model):
    applied = {"act"}

    def forward(self, x: Tensor) -> Tensor:
        h = unread = self.a(x)  # noqa: F841
        return self.act(h)


class Walrus(Model):
    def forward(self, x: Tensor) -> Tensor:
        return self.act(h := self.a(x)) + h


class WalrusUnread(Model):
    applied = {"act"}

    def forward(self, x: Tensor) -> Tensor:
        if (h := self.a(x)).shape[0] > 0:
            h = self.act(h)
        return h


class TupleUnpacking(Model):
    def forward(self, x: Tensor) -> Tensor:
        h, keep = self.a(x), x
        h, keep = self.act(h), h
        return h + keep


class TupleUnpackingSafe(Model):
    applied = {"act"}

    def forward(self, x: Tensor) -> Tensor:
        h, keep = self.a(x), x
        h = self.act(h)
        return h + keep


class Swap(Model):
    def forward(self, x: Tensor) -> Tensor:
        h, g = self.a(x), self.b(x)
        h, g = g, h
        return self.act(h) + g + h


class Loop(Model):
    applied = {"act"}

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.act(self.a(x))
        return x


class LoopReadsTheTurnBefore(Model):
    others = ({"turns": 3},)

    def forward(self, x: Tensor, turns: int = 1) -> Tensor:
        before = x
        total = x
        for _ in range(turns):
            h = self.a(x)
            total = total + before
            x = self.act(h)
            before = h
        return total + x


class LoopReadsItsOwn(Model):
    others = ({"turns": 2},)

    def forward(self, x: Tensor, turns: int = 1) -> Tensor:
        h = self.a(x)
        y = x
        for _ in range(turns):
            y = y + self.act(h)
        return y


class WhileWithBreak(Model):
    others = ({"turns": 2},)

    def forward(self, x: Tensor, turns: int = 0) -> Tensor:
        h = self.a(x)
        while True:
            y = self.act(h)
            if turns == 0:
                break
            turns -= 1
            h = self.b(h)
        return y


class TryFinally(Model):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        try:
            return self.act(h)
        finally:
            self.total = h.detach().sum()


class TryExcept(Model):
    others = ({"fail": True},)

    def forward(self, x: Tensor, fail: bool = False) -> Tensor:
        h = self.a(x)
        try:
            y = self.act(h)
            if fail:
                raise KeyError
        except KeyError:
            y = h * 2
        return y


class Suppressed(Model):
    others = ({"fail": True},)

    def forward(self, x: Tensor, fail: bool = False) -> Tensor:
        h = self.a(x)
        with contextlib.suppress(KeyError):
            y = self.act(h)
            if fail:
                raise KeyError
            h = self.b(y)
        return h


class UnderAutocastOff(Model):
    applied = {"act"}

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        with torch.autocast("cpu", enabled=False):
            h = self.act(h)
        return self.b(h)


class Nested(Model):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)

        def late() -> Tensor:
            return h * 2

        y = self.act(h)
        return y + late()


class Lambda(Model):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        late = lambda: h * 2  # noqa: E731
        return self.act(h) + late()


class Generator(Model):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        late = (h * factor for factor in (1.0, 2.0))
        y = self.act(h)
        return y + sum(late)


class Comprehension(Model):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return sum([self.act(h) for _ in range(2)]) + x


class StarArguments(Model):
    def forward(self, *xs: Tensor) -> Tensor:
        h = self.a(*xs)
        return self.act(*[h]) + h


class Locals(Model):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        y = self.act(h)
        return y + locals()["h"]


class Deleted(Model):
    applied = {"act"}

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        y = self.act(h)
        del h
        return self.b(y)


class Augmented(Model):
    applied = {"act"}

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h += x
        h *= 2
        return self.act(h)


class AugmentedCallers(Model):
    def forward(self, x: Tensor) -> Tensor:
        h = x * 1
        keep = h
        h += 1
        return self.act(h) + keep


class InPlaceBefore(Model):
    applied = {"act"}

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).add_(x)
        return self.act(h)


class SavedByExp(Model):
    def forward(self, x: Tensor) -> Tensor:
        return self.act(torch.exp(self.a(x)))


class SavedBySigmoid(Model):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).sigmoid()
        return self.act(h)


class SavedBySoftmaxModule(Model):
    def __init__(self) -> None:
        super().__init__()
        self.softmax = nn.Softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.softmax(self.a(x)))


class SavedByProduct(Model):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        g = h * h
        return self.act(h) + g


class DropoutAfterReLU(Model):
    applied = {"act"}

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.drop(self.act(self.a(x))))


class DropoutIsAnAliasInEvaluation(Model):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        y = self.drop(h)
        return self.act(y) + h


class DropoutThenReLU(Model):
    applied = {"act", "drop"}

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(self.a(x))
        return self.act(h) + x


class IdentityIsAnAlias(Model):
    def __init__(self) -> None:
        super().__init__()
        self.same = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.same(x)) + x


class ResultOverwritten(Model):
    """In place, LeakyReLU's backward reads its result instead of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.LeakyReLU()

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.a(x))
        h += x
        return h


class ResultOverwrittenElsewhere(Model):
    others = ({"add": True},)

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.LeakyReLU())

    def forward(self, x: Tensor, add: bool = False) -> Tensor:
        h = self.inner(x)
        if add:
            h.add_(x)
        return h


class HelperMethod(Model):
    applied = {"act"}

    def forward(self, x: Tensor) -> Tensor:
        return self._finish(self.a(x))

    def _finish(self, x: Tensor) -> Tensor:
        return self.act(self.b(x))


class HelperMethodOnItsArgument(Model):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self._finish(h) + h

    def _finish(self, x: Tensor) -> Tensor:
        return self.act(x)


class InheritedForward(Temporary):
    applied = {"act"}


class SuperForward(Temporary):
    applied = {"act"}

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x


class Local(Model):
    applied = {"act"}

    def forward(self, x: Tensor) -> Tensor:
        act = self.act
        return act(self.a(x))


class AlsoCalledThroughAList(Model):
    others = ({"listed": True},)

    def __init__(self) -> None:
        super().__init__()
        self.listed = [self.act]

    def forward(self, x: Tensor, listed: bool = False) -> Tensor:
        if listed:
            return self.listed[0](x) + x
        return self.act(self.a(x))


class AlsoHeldByAClosure(Model):
    others = ({"late": True},)

    def __init__(self) -> None:
        super().__init__()
        act = self.act
        self.late = lambda t: act(t) + t

    def forward(self, x: Tensor, late: bool = False) -> Tensor:
        return self.late(x) if late else self.act(self.a(x))


class TwoNames(Model):
    others = ({"other": True},)

    def __init__(self) -> None:
        super().__init__()
        self.other = self.act

    def forward(self, x: Tensor, other: bool = False) -> Tensor:
        return self.other(x) + x if other else self.act(self.a(x))


class HandedToAFunction(Model):
    def forward(self, x: Tensor) -> Tensor:
        return twice(self.act, self.a(x))


def twice(function: Any, x: Tensor) -> Tensor:
    return function(x) + x


class OverAllChildren(Model):
    def forward(self, x: Tensor) -> Tensor:
        total = x
        for child in self.children():
            total = total + child(x)
        return total


class ReachedFromOutside(nn.Module):
    applied: ClassVar[set[str]] = set()
    others: ClassVar[tuple[dict[str, Any], ...]] = ({"outside": True},)

    def __init__(self) -> None:
        super().__init__()
        self.inner = Temporary()

    def forward(self, x: Tensor, outside: bool = False) -> Tensor:
        if outside:
            return self.inner.act(x) + x
        return self.inner(x)


class SequentialTakenApart(nn.Module):
    applied: ClassVar[set[str]] = set()
    others: ClassVar[tuple[dict[str, Any], ...]] = ({"apart": True},)

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8), nn.ReLU())

    def forward(self, x: Tensor, apart: bool = False) -> Tensor:
        if apart:
            h = self.body[0](x)
            return self.body[1](h) + h
        return self.body(x)


class SequentialIterated(nn.Module):
    applied: ClassVar[set[str]] = set()
    others: ClassVar[tuple[dict[str, Any], ...]] = ()

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        outputs = []
        for layer in self.body:
            x = layer(x)
            outputs.append(x)
        return sum(outputs)


class ReadyMadeSequence(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 8))


class SequentialSubclass(Model):
    applied = {"body.1", "act"}

    def __init__(self) -> None:
        super().__init__()
        self.body = ReadyMadeSequence()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.body(x))


class BlocksInAModuleList(nn.Module):
    applied: ClassVar[set[str]] = {"blocks.0.act", "blocks.1.act"}
    others: ClassVar[tuple[dict[str, Any], ...]] = ()

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Temporary(), SameName()])

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = block(x) + index
        return x


class ActivationsInAModuleList(nn.Module):
    applied: ClassVar[set[str]] = {"acts.0", "acts.1"}
    others: ClassVar[tuple[dict[str, Any], ...]] = ()

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.acts = nn.ModuleList([nn.ReLU(), nn.ELU()])

    def forward(self, x: Tensor) -> Tensor:
        for layer, act in zip(self.layers, self.acts, strict=False):
            x = act(layer(x))
        return x


class ActivationsInAModuleDict(Model):
    others = ({"kind": "own"},)

    def __init__(self) -> None:
        super().__init__()
        self.acts = nn.ModuleDict({"relu": nn.ReLU(), "own": nn.LeakyReLU()})

    def forward(self, x: Tensor, kind: str = "relu") -> Tensor:
        h = self.a(x)
        return self.acts[kind](h) + h


class ParallelBranches(nn.Module):
    """Two modules read the same tensor: each would overwrite what the other needs."""

    applied: ClassVar[set[str]] = set()
    others: ClassVar[tuple[dict[str, Any], ...]] = ()

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.left, self.right = nn.ReLU(), nn.ELU()

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        return self.left(h) + self.right(h)


class CustomProducer(nn.Module):
    applied: ClassVar[set[str]] = {"block.act", "act"}
    others: ClassVar[tuple[dict[str, Any], ...]] = ()

    def __init__(self) -> None:
        super().__init__()
        self.block = Temporary()
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.block(x))


class Keeper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.a(x)
        return self.kept


class ProducerKeepsItsResult(Model):
    def __init__(self) -> None:
        super().__init__()
        self.keeper = Keeper()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.keeper(x)) + self.keeper.kept


class ProducerReturnsItsArgument(Model):
    others = ({"through": True},)

    def forward(self, x: Tensor, through: bool = False) -> Tensor:
        return self.act(self.maybe(x, through)) + x

    def maybe(self, x: Tensor, through: bool) -> Tensor:
        if through:
            return x
        return self.a(x)


class HookKeepsTheInput(Model):
    def __init__(self) -> None:
        super().__init__()
        self.a.register_forward_hook(remember)

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.a(x))
        return h + self.a.remembered


def remember(module: nn.Module, args: Any, output: Tensor) -> None:
    module.remembered = output


class OwnProperty(Model):
    others = ({"by_property": True},)

    @property
    def activation(self) -> nn.Module:
        return self.act

    def forward(self, x: Tensor, by_property: bool = False) -> Tensor:
        return self.activation(x) + x if by_property else self.act(self.a(x))


class ByName(Model):
    others = ({"name": "act"},)

    def forward(self, x: Tensor, name: str = "a") -> Tensor:
        h = self.act(self.a(x))
        return getattr(self, name)(x) + x + h


class FunctionalProducers(Model):
    applied = {"act"}

    def forward(self, x: Tensor) -> Tensor:
        h = F.linear(x, self.a.weight)
        return self.act(torch.cat([h, x], dim=1))


class MetadataAfterwards(Model):
    applied = {"act"}

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        y = self.act(h)
        return y.view(h.shape[0], -1) / h.size(1)


class CustomGradient(Model):
    """A function that keeps its result where autograd's version counter does not look."""

    def forward(self, x: Tensor) -> Tensor:
        return self.act(Double.apply(self.a(x)))


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.kept = x * 2
        return ctx.kept

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2 + ctx.kept * 0.01


_BASES = {Model, Keeper, ReadyMadeSequence}
MODELS: list[type[Any]] = [
    entry
    for entry in list(globals().values())
    if isinstance(entry, type) and issubclass(entry, nn.Module) and entry not in _BASES
]
