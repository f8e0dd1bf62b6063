"""Hostile models whose layers are compiled by other means, computed, pruned, quantised, made late or moved."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

from support.hostile_parts import DIM, Block, Net, Watched, convolutional, row, see

SCRIPTED = "ignore:.*torch.jit.*:DeprecationWarning"

# -- compiled by other means -------------------------------------------------------------------------------------


@row(warns=(SCRIPTED,))
def a_scripted_submodule() -> nn.Module:
    net = convolutional()
    net[2] = torch.jit.script(nn.Sequential(nn.Conv2d(DIM, DIM, 1), nn.ReLU()))
    return net


@row(warns=(SCRIPTED,))
def a_scripted_activation() -> nn.Module:
    net = Net()
    net.stem[2] = torch.jit.script(nn.ReLU())
    net.blocks[0].mlp[1] = torch.jit.script(nn.ReLU())
    return net


@row(warns=(SCRIPTED,))
def a_scripted_block_of_attention() -> nn.Module:
    net = Net()
    net.blocks[0] = torch.jit.script(net.blocks[0])
    return net


@row(warns=(SCRIPTED, "ignore::torch.jit.TracerWarning"))
def a_traced_submodule() -> nn.Module:
    net = Net()
    net.stem = torch.jit.trace(net.stem, torch.randn(2, 3, 8, 8))
    return net


@row
def a_symbolically_traced_net() -> nn.Module:
    return torch.fx.symbolic_trace(convolutional())


@row
def a_symbolically_traced_block() -> nn.Module:
    net = Net()
    net.blocks[0] = torch.fx.symbolic_trace(net.blocks[0])
    return net


@row
def a_part_in_data_parallel() -> nn.Module:
    net = Net()
    net.stem = nn.DataParallel(net.stem)
    net.blocks[0] = nn.DataParallel(net.blocks[0])
    return net


# -- weights that are computed -----------------------------------------------------------------------------------


@row(warns=("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning",))
def weights_normed_in_the_old_way() -> nn.Module:
    net = Net()
    torch.nn.utils.weight_norm(net.stem[0])
    torch.nn.utils.weight_norm(net.blocks[0].attention.qkv)
    return net


@row
def weights_with_spectral_norm_in_the_old_way() -> nn.Module:
    net = Net()
    torch.nn.utils.spectral_norm(net.stem[3])
    torch.nn.utils.spectral_norm(net.blocks[0].attention.qkv)
    return net


@row
def weights_normed() -> nn.Module:
    net = Net()
    parametrizations.weight_norm(net.stem[0])
    parametrizations.weight_norm(net.blocks[0].attention.qkv)
    return net


@row
def weights_with_spectral_norm() -> nn.Module:
    """Each call of the layer takes one more step of the power iteration that the norm comes from."""
    net = Net()
    parametrizations.spectral_norm(net.stem[3])
    parametrizations.spectral_norm(net.blocks[0].attention.qkv)
    return net


@row
def orthogonal_weights() -> nn.Module:
    net = Net()
    parametrizations.orthogonal(net.blocks[0].attention.out)
    parametrizations.orthogonal(net.head)
    return net


@row
def a_parametrization_that_counts() -> nn.Module:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, weight: Tensor) -> Tensor:
            self.calls += 1
            see("weight", self.calls)
            return weight * (1 + 0.01 * self.calls)

    net = Net()
    for layer in (net.stem[0], net.stem[3], net.blocks[0].attention.qkv, net.blocks[1].mlp[0]):
        parametrize.register_parametrization(layer, "weight", Counts())
    return net


@row
def pruned_weights() -> nn.Module:
    net = Net()
    for layer in (net.stem[0], net.stem[3], net.blocks[0].attention.qkv):
        prune.l1_unstructured(layer, "weight", amount=0.5)
    return net


# -- quantisation ------------------------------------------------------------------------------------------------


@row
def quantisation_stubs() -> nn.Module:
    net = convolutional()
    return nn.Sequential(torch.ao.quantization.QuantStub(), net, torch.ao.quantization.DeQuantStub())


@row
def fake_quantisation() -> nn.Module:
    """Its observers move their averages at every call."""
    fake = functools.partial(
        torch.ao.quantization.FakeQuantize,
        observer=torch.ao.quantization.MovingAverageMinMaxObserver,
        quant_min=0,
        quant_max=255,
    )
    net = Net()
    net.stem.insert(3, fake())
    net.blocks[0].mlp.insert(2, fake())
    net.blocks[0].attention.qkv = nn.Sequential(net.blocks[0].attention.qkv, fake())
    return net


# -- made late, or moved -----------------------------------------------------------------------------------------


@row(warns=("ignore:Lazy modules are a new feature:UserWarning",))
def lazy_layers_made_in_the_first_step() -> nn.Module:
    class Lazy(Watched):
        def __init__(self) -> None:
            net = convolutional()
            net[0], net[-1] = nn.LazyConv2d(DIM, 3, padding=1), nn.LazyLinear(4)
            super().__init__(net)

    return Lazy()


@row
def blocks_replaced_during_the_run() -> nn.Module:
    class Grows(Watched):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 3:
                with torch.random.fork_rng():
                    torch.manual_seed(5)
                    self.net.blocks[1] = Block()
                    self.net.stem[4] = nn.ReLU()
                self.optimizers().add_param_group({"params": list(self.net.blocks[1].parameters())})

    return Grows()


@row
def a_teacher_copied_from_the_net_during_the_run() -> nn.Module:
    """As EMA and target networks: the copy has to compute with its own weights."""

    class Teaches(Watched):
        def loss(self, x: Tensor, y: Tensor) -> Tensor:
            if len(self.losses) == 2:
                import copy

                self.__dict__["teacher"] = copy.deepcopy(self.net).requires_grad_(False)
            loss = super().loss(x, y)
            if "teacher" in self.__dict__:
                loss = loss + (self.net.head.weight - self.teacher.head.weight).square().sum()
                loss = loss + (self.net.stem(x) - self.teacher.stem(x)).square().mean()
            return loss

    return Teaches()


@row
def a_net_saved_whole_during_the_run() -> nn.Module:
    class Saves(Watched):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx in (0, 3):
                torch.save(self.net, f"net-{batch_idx}.pt")
                loaded = torch.load(f"net-{batch_idx}.pt", weights_only=False)
                see("loaded", len(list(loaded.parameters())), tuple(loaded(batch[0]).shape))

    return Saves()
