"""Hostile models with hooks, of every kind and everywhere, and with modes that count."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from support.hostile_parts import Block, Net, Watched, convolutional, row, see

# Torch says it of the first module of a net, whose input nobody differentiates by.
NO_INPUT_GRADIENT = "ignore:Full backward hook is firing:UserWarning"


@row
def forward_hooks_on_every_module() -> nn.Module:
    net = Net()
    for name, module in net.named_modules():
        module.register_forward_hook(lambda _, args, out, name=name: see(name, tuple(out.shape)))
    return net


@row(recomputed=True)
def forward_hooks_that_keep_outputs_for_the_loss() -> nn.Module:
    class Distills(Watched):
        def __init__(self) -> None:
            super().__init__()
            self.kept: dict[str, Tensor] = {}
            for name in ("stem.0", "stem.2", "blocks.1.mlp.1", "blocks.1"):
                self.net.get_submodule(name).register_forward_hook(lambda _, args, out, name=name: self.keep(name, out))

        def keep(self, name: str, out: Tensor) -> None:
            self.kept[name] = out

        def loss(self, x: Tensor, y: Tensor) -> Tensor:
            return super().loss(x, y) + sum(out.square().mean() for out in self.kept.values())

    return Distills()


@row
def hooks_that_keep_the_inputs_of_activations() -> nn.Module:
    """Which is to say that nobody may overwrite them."""

    class KeepsInputs(Watched):
        def __init__(self) -> None:
            super().__init__()
            self.inputs: list[Tensor] = []
            for module in self.net.modules():
                if isinstance(module, nn.ReLU | nn.Dropout):
                    module.register_forward_pre_hook(lambda _, args: self.inputs.append(args[0]))

        def loss(self, x: Tensor, y: Tensor) -> Tensor:
            self.inputs.clear()
            loss = super().loss(x, y)
            see("inputs", [tuple(t.shape) for t in self.inputs])
            return loss + sum(t.clamp(max=0).square().mean() for t in self.inputs)

    return KeepsInputs()


@row
def forward_hooks_that_change_outputs() -> nn.Module:
    net = Net()
    for module in (net.stem[0], net.stem[2], net.blocks[0].attention, net.blocks[1].mlp[1]):
        module.register_forward_hook(lambda _, args, out: (see("changed"), out * 1.5)[1])
    return net


@row
def forward_hooks_with_keywords_that_are_always_called() -> nn.Module:
    net = Net()
    for block in net.blocks:
        hook = lambda _, args, kwargs, out: see(len(args), list(kwargs), tuple(out.shape))  # noqa: E731
        block.register_forward_hook(hook, with_kwargs=True, always_call=True)
    return net


@row(warns=(NO_INPUT_GRADIENT,))
def backward_hooks_on_every_module() -> nn.Module:
    net = Net()
    for name, module in net.named_modules():
        module.register_full_backward_hook(lambda _, grads, outs, name=name: see(name, [tuple(g.shape) for g in outs]))
    return net


@row(warns=(NO_INPUT_GRADIENT,))
def backward_pre_hooks_and_hooks_on_parameters() -> nn.Module:
    net = Net()
    for name, module in net.named_modules():
        module.register_full_backward_pre_hook(lambda _, grads, name=name: see(name, len(grads)))
    for name, parameter in net.named_parameters():
        parameter.register_hook(lambda grad, name=name: see(name, tuple(grad.shape)))
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: see(name, p.grad is not None))
    return net


@row
def hooks_on_activations() -> nn.Module:
    class Hooks(Block):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            out.register_hook(lambda grad: (see("gradient", tuple(grad.shape)), grad * 0.5)[1])
            return out

    return Net(Hooks)


@row(warns=(NO_INPUT_GRADIENT,))
def hooks_on_all_modules_of_the_process() -> nn.Module:
    class Everywhere(Watched):
        def on_fit_start(self) -> None:
            hooks = torch.nn.modules.module
            self.handles = [
                hooks.register_module_forward_hook(lambda m, args, out: see("after", type(m).__name__)),
                hooks.register_module_forward_pre_hook(lambda m, args: see("before", type(m).__name__)),
                hooks.register_module_full_backward_hook(lambda m, grads, outs: see("back", type(m).__name__)),
            ]

        def on_fit_end(self) -> None:
            for handle in self.handles:
                handle.remove()

    return Everywhere()


@row
def hooks_that_come_and_go_during_the_run() -> nn.Module:
    class Probes(Watched):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            parts = [self.net.stem[0], self.net.stem[2], self.net.blocks[0].attention]
            count = lambda m, args, out: see(type(m).__name__, tuple(out.shape))  # noqa: E731
            self.handles = [part.register_forward_hook(count) for part in parts if batch_idx in (0, 3)]

        def on_train_batch_end(self, *_: Any) -> None:
            for handle in self.handles:
                handle.remove()

    return Probes()


@row
def a_hook_that_ends_the_forward_by_raising() -> nn.Module:
    """As feature extractors do: what comes after the layer of interest is not to be computed."""

    class EnoughError(Exception):
        pass

    class Features(Watched):
        def __init__(self) -> None:
            super().__init__()
            self.net.blocks[1].register_forward_hook(self.stop)

        def stop(self, module: nn.Module, args: Any, out: Tensor) -> None:
            see("stopped", tuple(out.shape))
            raise EnoughError(out)

        def loss(self, x: Tensor, y: Tensor) -> Tensor:
            try:
                self.net(x)
            except EnoughError as enough:
                return F.cross_entropy(self.net.head(enough.args[0].mean(dim=1)), y)
            raise AssertionError("the hook was not called")

    return Features()


@row
def a_dispatch_mode_that_counts_convolutions() -> nn.Module:
    class Counts(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is torch.ops.aten.convolution.default:
                see("convolution", tuple(args[0].shape))
            return function(*args, **(kwargs or {}))

    class Counted(Watched):
        def loss(self, x: Tensor, y: Tensor) -> Tensor:
            with Counts():
                return super().loss(x, y)

    return Counted(convolutional())
