"""Hostile models whose modules have ways of their own: of being called, of finding attributes, of being shared."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from support.hostile_parts import DIM, Attention, Block, Feed, Net, row, see

SCRIPTED = "ignore:.*torch.jit.*:DeprecationWarning"

# -- modules with ways of their own ------------------------------------------------------------------------------


@row(recomputed=True)
def modules_with_slots() -> nn.Module:
    class Slotted(Block):
        __slots__ = ("scale",)

        def __init__(self) -> None:
            super().__init__()
            self.scale = 2.0

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) / self.scale

    return Net(Slotted)


@row(recomputed=True)
def modules_that_find_attributes_in_their_own_way() -> nn.Module:
    class Forwards(nn.Module):
        """Whatever it does not have, the block it wraps has."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = Block()

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                if name.startswith("_"):
                    raise
                return getattr(super().__getattr__("inner"), name)

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.attention(self.norm(x))
            return x + self.mlp(x)

    return Net(Forwards)


@row
def modules_that_set_attributes_in_their_own_way() -> nn.Module:
    class Frozen(Block):
        def __init__(self) -> None:
            super().__init__()
            self.ready = True

        def __setattr__(self, name: str, value: Any) -> None:
            if "ready" in self.__dict__ and name != "training":
                raise AttributeError(f"{name} may not be set any more")
            super().__setattr__(name, value)

    return Net(Frozen)


@row
def modules_that_are_called_in_their_own_way() -> nn.Module:
    class Calls(Block):
        def __call__(self, x: Tensor) -> Tensor:
            see("called", tuple(x.shape))
            return self.forward(x) * 0.5

    return Net(Calls)


@row(recomputed=True)
def a_forward_that_is_a_property() -> nn.Module:
    class Chooses(Block):
        @property
        def forward(self) -> Any:
            return self.one_way if self.training else self.other_way

        def one_way(self, x: Tensor) -> Tensor:
            return Block.forward(self, x)

        def other_way(self, x: Tensor) -> Tensor:
            return x

    return Net(Chooses)


@row(recomputed=True)
def a_forward_that_is_a_partial() -> nn.Module:
    class Scales(Block):
        def __init__(self) -> None:
            super().__init__()
            self.forward = functools.partial(self.scaled, scale=0.5)

        def scaled(self, x: Tensor, scale: float) -> Tensor:
            return Block.forward(self, x) * scale

    return Net(Scales)


@row
def a_forward_that_is_static() -> nn.Module:
    class Cubes(nn.Module):
        @staticmethod
        def forward(x: Tensor) -> Tensor:
            weights = (x @ x.transpose(-2, -1) / DIM**0.5).softmax(-1)
            return x + weights @ x

    return Net(Cubes)


@row
def a_forward_that_is_wrapped() -> nn.Module:
    def counted(forward: Any) -> Any:
        @functools.wraps(forward)
        def counting(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            see("called", type(self).__name__)
            return forward(self, *args, **kwargs)

        return counting

    class Wrapped(Attention):
        forward = counted(Attention.forward)

    class WrappedReLU(nn.ReLU):
        forward = counted(nn.ReLU.forward)

    class Wraps(Block):
        def __init__(self) -> None:
            super().__init__()
            self.attention = Wrapped()
            self.mlp[1] = WrappedReLU()

        forward = counted(Block.forward)

    return Net(Wraps)


@row
def a_forward_that_is_set_on_the_instance() -> nn.Module:
    net = Net()
    for module in (net.stem[0], net.stem[2], net.blocks[0].attention, net.blocks[1]):

        def spied(x: Tensor, forward: Any = module.forward) -> Tensor:
            see("forward", tuple(x.shape))
            return forward(x)

        module.forward = spied
    return net


@row(recomputed=True)
def forwards_that_are_called_directly() -> nn.Module:
    class Direct(Block):
        def forward(self, x: Tensor) -> Tensor:
            x = x + self.attention.forward(self.norm.forward(x))
            hidden = nn.ReLU.forward(self.mlp[1], self.mlp[0].forward(x))
            return x + nn.Sequential.forward(self.mlp[2:], hidden)

    return Net(Direct)


@row
def modules_that_share_a_child() -> nn.Module:
    net = Net(second=Block)
    net.blocks[1].attention = net.blocks[0].attention
    net.blocks[1].mlp = net.blocks[0].mlp
    net.stem[4] = net.stem[2]
    return net


@row
def one_module_used_many_times_in_a_step() -> nn.Module:
    class Recurs(Block):
        def forward(self, x: Tensor, depth: int = 3) -> Tensor:
            see("depth", depth)
            x = super().forward(x)
            return self(x, depth - 1) if depth else x

    return Net(Recurs)


@row
def a_forward_that_yields() -> nn.Module:
    class Yields(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Block(), Feed(), Block()])

        def forward(self, x: Tensor) -> Any:
            for index, layer in enumerate(self.layers):
                x = layer(x)
                see("layer", index)
                yield x

    class Consumes(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.tokens(x)
            for block in self.blocks:
                outs = []
                for out in block(x):
                    see("consumed", tuple(out.shape))
                    outs.append(out)
                x = torch.stack(outs).mean(dim=0)
            return self.head(x.mean(dim=1))

    return Consumes(Yields, Yields)
