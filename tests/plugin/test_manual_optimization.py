"""`16-mixed` with manual optimization: several optimizers, several scales, every order of calls."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_accel import AccelPlugin
from lightning_accel.settings import Plan
from support.lightning_models import Supervised, mlp, sgd, vectors

pytestmark = pytest.mark.numbers

MakeTrainer = Callable[..., Any]


def fp16(**settings: Any) -> AccelPlugin:
    return AccelPlugin.from_plan(Plan().replace(precision="16-mixed", memory_format="off", report=False, **settings))


def module(optimizer: Any = sgd, kind: type[Supervised] = Supervised) -> Supervised:
    torch.manual_seed(0)
    return kind(mlp(), optimizer)


def stepped_with(optimizer: torch.optim.Optimizer, into: list[Tensor]) -> torch.optim.Optimizer:
    optimizer.register_step_pre_hook(lambda optimizer, *_: into.append(gradient_of(optimizer)))
    return optimizer


def gradient_of(optimizer: torch.optim.Optimizer) -> Tensor:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return torch.cat([torch.zeros(0), *(p.grad.flatten().clone() for p in parameters if p.grad is not None)])


class Manual(Supervised):
    """Two halves of a network with an optimizer each; subclasses say in which order to work."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.automatic_optimization = False
        self.other = mlp()
        self.seen: tuple[list[Tensor], list[Tensor]] = ([], [])
        self.unscaled: list[Tensor] = []

    def loss_of(self, net: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(net(batch[0]), batch[1])

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.unscaled.append(gradient_of(optimizer))

    def configure_optimizers(self) -> Any:
        return [
            stepped_with(torch.optim.SGD(net.parameters(), lr=0.1), seen)
            for net, seen in zip((self.net, self.other), self.seen, strict=True)
        ]


class OneAfterTheOther(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        for optimizer, net in zip(self.optimizers(), (self.net, self.other), strict=True):
            optimizer.zero_grad()
            self.manual_backward(self.loss_of(net, batch))
            optimizer.step()


class BothBackwardThenBothStep(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        for optimizer, net in zip(self.optimizers(), (self.net, self.other), strict=True):
            optimizer.zero_grad()
            self.manual_backward(self.loss_of(net, batch))
        for optimizer in self.optimizers():
            optimizer.step()


class FirstStepsAgainBeforeTheSecond(Manual):
    """The second optimizer's gradients wait, under the scale of their backward pass, while the first steps twice."""

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        first, second = self.optimizers()
        second.zero_grad()
        self.manual_backward(self.loss_of(self.other, batch))
        for _ in range(2):
            first.zero_grad()
            self.manual_backward(self.loss_of(self.net, batch))
            first.step()
        second.step()


class CriticStepsThrice(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        first, second = self.optimizers()
        for _ in range(3):
            first.zero_grad()
            self.manual_backward(self.loss_of(self.net, batch))
            first.step()
        second.zero_grad()
        self.manual_backward(self.loss_of(self.other, batch))
        second.step()


class ClipsByHand(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        for optimizer, net in zip(self.optimizers(), (self.net, self.other), strict=True):
            optimizer.zero_grad()
            self.manual_backward(self.loss_of(net, batch))
            self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
            optimizer.step()


class ClipsOneThenBackwardOfTheOther(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        for optimizer, net in zip(self.optimizers(), (self.net, self.other), strict=True):
            optimizer.zero_grad()
            self.manual_backward(self.loss_of(net, batch))
            self.clip_gradients(optimizer, gradient_clip_val=100, gradient_clip_algorithm="norm")
        for optimizer in self.optimizers():
            optimizer.step()


class ClipsAndThenDoesNotStep(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        for optimizer, net in zip(self.optimizers(), (self.net, self.other), strict=True):
            optimizer.zero_grad()
            self.manual_backward(self.loss_of(net, batch))
            self.clip_gradients(optimizer, gradient_clip_val=100, gradient_clip_algorithm="norm")
            if batch_idx % 2:
                optimizer.step()


class WithClosures(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        for optimizer, net in zip(self.optimizers(), (self.net, self.other), strict=True):

            def closure(optimizer: Any = optimizer, net: nn.Module = net) -> None:
                optimizer.zero_grad()
                self.manual_backward(self.loss_of(net, batch))

            optimizer.step(closure)


class ClosureWithoutBackward(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            optimizer.step(lambda: None)


class AccumulatesByHand(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        for optimizer, net in zip(self.optimizers(), (self.net, self.other), strict=True):
            self.manual_backward(self.loss_of(net, batch) / 2)
            if batch_idx % 2:
                optimizer.step()
                optimizer.zero_grad()


MANUAL = [
    OneAfterTheOther,
    BothBackwardThenBothStep,
    FirstStepsAgainBeforeTheSecond,
    CriticStepsThrice,
    ClipsByHand,
    ClipsOneThenBackwardOfTheOther,
    ClipsAndThenDoesNotStep,
    WithClosures,
    ClosureWithoutBackward,
    AccumulatesByHand,
]


@pytest.mark.parametrize("kind", MANUAL)
def test_manual_optimization_steps_with_the_gradients_of_float32(make_trainer: MakeTrainer, kind: Any) -> None:
    plain, accelerated = module(kind=kind), module(kind=kind)
    make_trainer(max_epochs=2).fit(plain, vectors())
    plugin = fp16()
    assert plugin.scaler is not None
    # Every update changes the scale: a gradient that is unscaled with another than its own shows.
    plugin.scaler.load_state_dict(
        {"scale": 16.0, "growth_factor": 1.3, "backoff_factor": 0.5, "growth_interval": 1, "_growth_tracker": 0}
    )
    make_trainer(max_epochs=2, plugins=[plugin]).fit(accelerated, vectors())
    for gradient, expected in zip(accelerated.unscaled, plain.unscaled, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=3e-2, atol=3e-3)


def test_an_overflow_of_one_optimizer_lets_the_other_step(make_trainer: MakeTrainer) -> None:
    class OneOverflows(BothBackwardThenBothStep):
        def loss_of(self, net: nn.Module, batch: Any) -> Tensor:
            loss = super().loss_of(net, batch)
            return loss * math.inf if net is self.net else loss

    model = module(kind=OneOverflows)
    plugin = fp16()
    make_trainer(plugins=[plugin]).fit(model, vectors())
    assert [len(seen) for seen in model.seen] == [0, 4]
    assert plugin.scaler is not None
    assert plugin.scaler.skipped_steps == 4


def test_many_steps_inside_one_training_step_update_the_scale_in_between(make_trainer: MakeTrainer) -> None:
    """As in reinforcement learning: were the scale kept to the end, one overflow would cost every step."""

    class ManySteps(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
            optimizer = self.optimizers()
            for i in range(6):
                optimizer.zero_grad()
                loss = self.loss_of(self.net, batch)
                self.manual_backward(loss * math.inf if i == 0 else loss)
                optimizer.step()

        def configure_optimizers(self) -> Any:
            return stepped_with(sgd(self.net.parameters()), self.seen[0])

    model = module(kind=ManySteps)
    plugin = fp16()
    make_trainer(plugins=[plugin], limit_train_batches=1).fit(model, vectors())
    assert len(model.seen[0]) == 5
    assert plugin.scaler is not None
    assert plugin.scaler.get_scale() == 2.0**15
