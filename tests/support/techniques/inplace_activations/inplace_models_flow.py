"""Small models, continued from ``inplace_models``: branches, loops, exceptions, nested functions."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from support.techniques.inplace_activations.inplace_models import Model


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
    def forward(self, x: Tensor) -> Tensor:
        h = unread = self.a(x)  # noqa: F841
        return self.act(h)


class Walrus(Model):
    def forward(self, x: Tensor) -> Tensor:
        return self.act(h := self.a(x)) + h


class WalrusUnread(Model):
    in_place = {"act": 1}

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
    in_place = {"act": 1}

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
    in_place = {"act": 3}

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
    in_place = {"act": 1}

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
    in_place = {"act": 1}

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        y = self.act(h)
        del h
        return self.b(y)


class Augmented(Model):
    in_place = {"act": 1}

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
    in_place = {"act": 1}

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).add_(x)
        return self.act(h)
