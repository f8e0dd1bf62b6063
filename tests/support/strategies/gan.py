"""Two networks that are trained against each other, each by an optimizer of its own."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

DIM = 16


class Step(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(dim, 2 * dim), nn.SiLU(), nn.Linear(2 * dim, dim))

    @override
    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


def perceptron(inputs: int, outputs: int, steps: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, DIM), *(Step(DIM) for _ in range(steps)), nn.Linear(DIM, outputs))


class Gan(LightningModule):
    """A generator and a critic of points in the plane, each with an optimizer, stepped by hand.

    Args:
        accumulation: Batches to a step of the optimizers.
        clip: Largest norm of the gradients of each; None leaves them.
    """

    def __init__(self, accumulation: int = 1, clip: float | None = None) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.critic = perceptron(4, 2, steps=3), perceptron(2, 1, steps=2)
        self.accumulation, self.clip = accumulation, clip
        self.losses: list[float] = []

    @override
    def forward(self, noise: Tensor) -> Tensor:
        return self.generator(noise)

    def critic_loss(self, points: Tensor, noise: Tensor) -> Tensor:
        made = self.generator(noise).detach()
        return F.softplus(-self.critic(points)).mean() + F.softplus(self.critic(made)).mean()

    def generator_loss(self, noise: Tensor) -> Tensor:
        return F.softplus(-self.critic(self.generator(noise))).mean()

    @override
    def training_step(self, batch: Any, batch_idx: int) -> None:
        points, noise = batch
        of_generator, of_critic = self.optimizers()
        for optimizer, loss in (
            (of_critic, lambda: self.critic_loss(points, noise)),
            (of_generator, lambda: self.generator_loss(noise)),
        ):
            self.toggle_optimizer(optimizer)
            self.descend(optimizer, loss(), is_due=(batch_idx + 1) % self.accumulation == 0)
            self.untoggle_optimizer(optimizer)

    def descend(self, optimizer: Any, loss: Tensor, is_due: bool) -> None:
        self.losses.append(float(loss.detach()))
        self.manual_backward(loss / self.accumulation)
        if is_due:
            self.clip_gradients(optimizer, self.clip, "norm")
            optimizer.step()
            optimizer.zero_grad()

    @override
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.critic_loss(*batch), sync_dist=True)

    @override
    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.critic_loss(*batch), sync_dist=True)

    @override
    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[1])

    @override
    def configure_optimizers(self) -> Any:
        def adam(net: nn.Module) -> torch.optim.Optimizer:
            return torch.optim.Adam(net.parameters(), lr=5e-3, betas=(0.5, 0.99), eps=1e-5)

        return adam(self.generator), adam(self.critic)
