"""Small models, continued from ``inplace_models``: what modules do with tensors, and code with modules."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from support.techniques.inplace_activations.inplace_models import Model, Temporary


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
    in_place = {"act": 1}

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
    in_place = {"drop": 1}

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
    in_place = {"act": 1}

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
    in_place = {"act": 1}


class SuperForward(Temporary):
    in_place = {"act": 1}

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x


class Local(Model):
    in_place = {"act": 1}

    def forward(self, x: Tensor) -> Tensor:
        act = self.act
        return act(self.a(x))


class AlsoCalledThroughAList(Model):
    in_place = {"act": 1}
    others = ({"listed": True},)

    def __init__(self) -> None:
        super().__init__()
        self.listed = [self.act]

    def forward(self, x: Tensor, listed: bool = False) -> Tensor:
        if listed:
            return self.listed[0](x) + x
        return self.act(self.a(x))


class AlsoHeldByAClosure(Model):
    in_place = {"act": 1}
    others = ({"late": True},)

    def __init__(self) -> None:
        super().__init__()
        act = self.act
        self.late = lambda t: act(t) + t

    def forward(self, x: Tensor, late: bool = False) -> Tensor:
        return self.late(x) if late else self.act(self.a(x))


class TwoNames(Model):
    in_place = {"act": 1}
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
    in_place: ClassVar[dict[str, int]] = {"inner.act": 1}
    others: ClassVar[tuple[dict[str, Any], ...]] = ({"outside": True},)

    def __init__(self) -> None:
        super().__init__()
        self.inner = Temporary()

    def forward(self, x: Tensor, outside: bool = False) -> Tensor:
        if outside:
            return self.inner.act(x) + x
        return self.inner(x)
