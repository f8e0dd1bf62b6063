"""Small models, continued: containers of modules, producers that keep what they give, lookups by name."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.techniques.inplace_activations.inplace_models import Model, SameName, Temporary


class SequentialTakenApart(nn.Module):
    in_place: ClassVar[dict[str, int]] = {"body.1": 1}
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
    in_place: ClassVar[dict[str, int]] = {}
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
    in_place = {"act": 1, "body.1": 1}

    def __init__(self) -> None:
        super().__init__()
        self.body = ReadyMadeSequence()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.body(x))


class BlocksInAModuleList(nn.Module):
    in_place: ClassVar[dict[str, int]] = {"blocks.0.act": 1, "blocks.1.act": 1}
    others: ClassVar[tuple[dict[str, Any], ...]] = ()

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Temporary(), SameName()])

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = block(x) + index
        return x


class ActivationsInAModuleList(nn.Module):
    in_place: ClassVar[dict[str, int]] = {}
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

    in_place: ClassVar[dict[str, int]] = {}
    others: ClassVar[tuple[dict[str, Any], ...]] = ()

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.left, self.right = nn.ReLU(), nn.ELU()

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        return self.left(h) + self.right(h)


class CustomProducer(nn.Module):
    in_place: ClassVar[dict[str, int]] = {"block.act": 1, "act": 1}
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
    in_place = {"act": 1}
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
    in_place = {"act": 1}
    others = ({"by_property": True},)

    @property
    def activation(self) -> nn.Module:
        return self.act

    def forward(self, x: Tensor, by_property: bool = False) -> Tensor:
        return self.activation(x) + x if by_property else self.act(self.a(x))


class ByName(Model):
    in_place = {"act": 2}
    others = ({"name": "act"},)

    def forward(self, x: Tensor, name: str = "a") -> Tensor:
        h = self.act(self.a(x))
        return getattr(self, name)(x) + x + h


class FunctionalProducers(Model):
    in_place = {"act": 1}

    def forward(self, x: Tensor) -> Tensor:
        h = F.linear(x, self.a.weight)
        return self.act(torch.cat([h, x], dim=1))


class MetadataAfterwards(Model):
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
