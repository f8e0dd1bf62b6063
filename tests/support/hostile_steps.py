"""Hostile models by what their training steps do: penalties, several optimizers, skipped steps, logs and metrics."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torchmetrics
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from support.hostile_parts import CLASSES, DIM, Block, Feed, Net, Watched, convolutional, row, see

# -- autograd in other ways --------------------------------------------------------------------------------------


@row
def a_gradient_penalty() -> nn.Module:
    class Penalised(Watched):
        def loss(self, x: Tensor, y: Tensor) -> Tensor:
            x = x.requires_grad_()
            (slope,) = torch.autograd.grad(self.net(x).square().sum(), x, create_graph=True)
            return super().loss(x, y) + 0.1 * slope.square().mean()

    net = Net()
    for block in net.blocks:
        block.mlp[1] = nn.SiLU()
    return Penalised(net)


@row
def checkpointed_by_the_user() -> nn.Module:
    class Checkpoints(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.tokens(x)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return self.head(x.mean(dim=1))

    class Counts(Block):
        def forward(self, x: Tensor) -> Tensor:
            see("block", tuple(x.shape))
            return super().forward(x)

    return Checkpoints(Counts)


@row
def checkpointed_by_the_user_with_a_second_backward() -> nn.Module:
    class Checkpoints(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.tokens(x)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=True)
            return self.head(x.mean(dim=1))

    return Checkpoints()


@row
def called_with_weights_from_elsewhere() -> nn.Module:
    class Functional(Watched):
        def loss(self, x: Tensor, y: Tensor) -> Tensor:
            weights = {name: 0.5 * p for name, p in self.net.named_parameters()}
            return super().loss(x, y) + F.cross_entropy(functional_call(self.net, weights, (x,)), y)

    return Functional()


@row
def gradients_of_every_sample() -> nn.Module:
    class PerSample(Watched):
        def loss(self, x: Tensor, y: Tensor) -> Tensor:
            weights = {name: p.detach() for name, p in self.net.named_parameters()}

            def sample_loss(weights: Any, x: Tensor, y: Tensor) -> Tensor:
                return F.cross_entropy(functional_call(self.net, weights, (x[None],)), y[None])

            gradients = vmap(grad(sample_loss), in_dims=(None, 0, 0))(weights, x, y)
            see("gradients", {name: tuple(g.shape) for name, g in gradients.items()})
            norm = sum(g.flatten(1).square().sum(1) for g in gradients.values())
            return (F.cross_entropy(self.net(x), y, reduction="none") / (1 + norm)).mean()

    return PerSample(_without_statistics())


@row
def an_ensemble_under_vmap() -> nn.Module:
    class Ensemble(Watched):
        def loss(self, x: Tensor, y: Tensor) -> Tensor:
            weights = {n: torch.stack([p, 0.5 * p]) for n, p in self.net.named_parameters()}
            logits = vmap(lambda w: functional_call(self.net, w, (x,)))(weights)
            return F.cross_entropy(logits.mean(0), y)

    return Ensemble(_without_statistics())


@row
def hooks_of_its_own_on_saved_tensors() -> nn.Module:
    class Packs(Watched):
        def loss(self, x: Tensor, y: Tensor) -> Tensor:
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
                return super().loss(x, y)

    return Packs()


# -- training steps ----------------------------------------------------------------------------------------------


@row
def two_optimizers_by_hand() -> nn.Module:
    class Adversarial(Watched):
        def __init__(self) -> None:
            super().__init__(convolutional())
            self.automatic_optimization = False
            self.critic = nn.Sequential(nn.Linear(CLASSES, DIM), nn.ReLU(), nn.Linear(DIM, 1))

        def training_step(self, batch: Any, batch_idx: int) -> None:
            x, y = batch
            first, second = self.optimizers()
            see("batch", batch_idx)
            logits = self.net(x)
            for optimizer, sign in ((second, 1.0), (first, -1.0)):
                optimizer.zero_grad()
                loss = F.cross_entropy(logits, y) * (optimizer is first) + sign * self.critic(logits).mean() ** 2
                self.manual_backward(loss, retain_graph=True)
                self.noted(loss)
            first.step()
            second.step()

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(part.parameters(), lr=0.05) for part in (self.net, self.critic)]

    return Adversarial()


@row(warns=("ignore:`training_step` returned `None`:UserWarning",))
def steps_that_are_skipped() -> nn.Module:
    class Skips(Watched):
        steps = 6

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            see("batch", batch_idx)
            loss = super().training_step(batch, batch_idx)
            return None if batch_idx in (0, 1, 4) else loss

    return Skips(Net(Feed))


@row
def steps_that_call_the_net_twice() -> nn.Module:
    class Twice(Watched):
        def loss(self, x: Tensor, y: Tensor) -> Tensor:
            first, second = self.net(x), self.net(x.flip(-1))
            return F.cross_entropy(first, y) + F.mse_loss(first, second)

    return Twice(_counted())


@row
def an_optimizer_that_calls_the_step_many_times() -> nn.Module:
    class ManySteps(Watched):
        steps = 2

        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), lr=0.01, max_iter=3)

    return ManySteps(_counted())


@row
def steps_that_log() -> nn.Module:
    class Logs(Watched):
        def loss(self, x: Tensor, y: Tensor) -> Tensor:
            logits = self.net(x)
            self.log("calls", 1.0, on_step=False, on_epoch=True, reduce_fx="sum")
            self.log("confidence", logits.amax(dim=-1).mean(), on_step=True, on_epoch=True)
            return F.cross_entropy(logits, y)

        def log(self, name: str, *args: Any, **kwargs: Any) -> None:
            see("logged", name)
            super().log(name, *args, **kwargs)

    return Logs(_counted())


@row
def modules_that_log() -> nn.Module:
    class Logs(Watched):
        def __init__(self) -> None:
            super().__init__(nn.Identity())
            self.conv, self.act, self.head = nn.Conv2d(3, DIM, 3), nn.ReLU(), nn.Linear(DIM * 36, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            x = self.act(self.conv(x))
            self.log("forwards", 1.0, on_step=False, on_epoch=True, reduce_fx="sum")
            see("forward", tuple(x.shape))
            return self.head(x.flatten(1))

        def loss(self, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(self(x), y)

    return Logs()


@row
def metrics_updated_in_the_step() -> nn.Module:
    class Measures(Watched):
        def __init__(self) -> None:
            super().__init__(Net(Feed))
            self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=CLASSES)
            self.net.seen_samples = torchmetrics.SumMetric()
            self.net.register_forward_hook(lambda net, args, out: net.seen_samples.update(len(out)))

        def loss(self, x: Tensor, y: Tensor) -> Tensor:
            logits = self.net(x)
            self.accuracy.update(logits, y)
            see("updates", self.accuracy.update_count, float(self.net.seen_samples.compute()))
            self.log("accuracy", self.accuracy)
            return F.cross_entropy(logits, y)

    return Measures()


@row
def steps_that_go_on_after_an_error() -> nn.Module:
    """As loops that survive running out of memory: the step is given up, the run is not."""

    class Forgives(Watched):
        def loss(self, x: Tensor, y: Tensor) -> Tensor:
            try:
                out = self.net(x)
                if len(self.losses) in (0, 3):
                    raise RuntimeError("out of memory")
                return F.cross_entropy(out, y)
            except RuntimeError as error:
                see("gave up", str(error))
                return self.net.head.weight.square().mean()

    return Forgives(Net(Feed))


@row(warns=("ignore:Found \\d+ module\\(s\\) in eval mode:UserWarning",))
def parts_that_are_frozen_and_thawed() -> nn.Module:
    class Thaws(Watched):
        def __init__(self) -> None:
            super().__init__(Net(Feed))
            self.thaw(False)

        def thaw(self, thawed: bool) -> None:
            self.net.stem.requires_grad_(thawed).train(thawed)
            self.net.blocks[0].requires_grad_(thawed).train(thawed)

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.thaw(batch_idx >= 3)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.05)

    return Thaws()


@row
def steps_that_look_at_their_own_modules() -> nn.Module:
    class Looks(Watched):
        def loss(self, x: Tensor, y: Tensor) -> Tensor:
            for name, module in self.net.named_modules():
                see(name, type(module).__name__, list(inspect.signature(module.forward).parameters))
            return super().loss(x, y)

    return Looks(Net(Feed))


@row
def a_forward_replaced_by_the_user_during_the_run() -> nn.Module:
    class Replaces(Watched):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            for part in (self.net.stem[2], self.net.blocks[0].attention):
                if batch_idx == 3:
                    part.forward = lambda x, part=part: (see("mine"), type(part).forward(part, x) * 0.5)[1]

    return Replaces()


@row
def gradients_accumulated_by_hand() -> nn.Module:
    class Accumulates(Watched):
        def __init__(self) -> None:
            super().__init__(_counted())
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            for x, y in zip(*(part.chunk(2) for part in batch), strict=True):
                self.manual_backward(self.noted(self.loss(x, y)))
            if batch_idx % 2:
                optimizer.step()
                optimizer.zero_grad()

    return Accumulates()


def _without_statistics() -> nn.Module:
    """Nothing that vmap refuses: running statistics, and random numbers that nobody said how to draw."""
    net = Net()
    net.stem[1] = nn.GroupNorm(2, DIM)
    for block in net.blocks:
        block.mlp[2] = nn.Identity()
    return net


def _counted() -> nn.Module:
    """A net whose convolutions and blocks say when they are called."""
    net = Net(Feed)
    for module in (net.stem[0], net.stem[3], *net.blocks):
        module.register_forward_pre_hook(lambda m, args: see(type(m).__name__, tuple(args[0].shape)))
    return net
