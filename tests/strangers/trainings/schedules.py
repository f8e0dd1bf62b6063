"""What moves rates, weights and gradients in the course of a run."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import GradientAccumulationScheduler, StochasticWeightAveraging
from torch import Tensor, nn
from torch.nn import functional as F

from strangers.table import Made, images, loader, made, training, vectors


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Dropout(0.1), nn.Linear(24, 4))


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
    )


class _Classifier(LightningModule):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", F.cross_entropy(self.net(x), y))


@training
def groups_frozen_first_and_plateaus() -> Made:
    class Finetunes(_Classifier):
        def on_train_epoch_start(self) -> None:
            frozen = self.current_epoch == 0
            for p in self.net[:2].parameters():
                p.requires_grad_(not frozen)
            self.net[1].train(not frozen)

        def configure_optimizers(self) -> Any:
            groups = [{"params": self.net[:2].parameters(), "lr": 1e-3}, {"params": self.net[5].parameters()}]
            opt = torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=1e-4)
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, patience=0, factor=0.5)
            return {"optimizer": opt, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}

    return made(Finetunes(_cnn()), loader(images()), loader(images(8), shuffle=False))


@training(resumes=False)
def stochastic_weight_averaging() -> Made:
    class Averaged(_Classifier):
        def configure_optimizers(self) -> Any:
            opt = torch.optim.SGD(self.parameters(), 0.05)
            return [opt], [torch.optim.lr_scheduler.CosineAnnealingLR(opt, 10)]

    return made(
        Averaged(_cnn()), loader(images()), callbacks=[StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1)]
    )


@training
def warm_up_by_overriding_the_step() -> Made:
    class Warm(_Classifier):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
            optimizer.step(closure=optimizer_closure)
            if self.trainer.global_step < 10:
                for group in optimizer.param_groups:
                    group["lr"] = 0.05 * min(1.0, (self.trainer.global_step + 1) / 10)

        def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
            optimizer.zero_grad(set_to_none=False)

        def configure_gradient_clipping(
            self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
        ) -> None:
            for p in self.parameters():
                if p.grad is not None:
                    p.grad.data.clamp_(-0.5, 0.5)
            self.clip_gradients(optimizer, gradient_clip_val=0.3, gradient_clip_algorithm="norm")

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.005)

    return made(Warm(_cnn()), loader(images()))


@training
def accumulated_by_hand_with_two_schedulers() -> Made:
    class Accumulates(_Classifier):
        def __init__(self) -> None:
            super().__init__(_mlp())
            self.automatic_optimization = False
            self.history = {"loss": [], "lr": []}

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            body, head = self.optimizers()
            loss = F.cross_entropy(self.net(x), y) / 2
            self.manual_backward(loss)
            if (batch_idx + 1) % 2 == 0:
                for opt, scheduler in zip((body, head), self.lr_schedulers(), strict=True):
                    opt.step()
                    opt.zero_grad()
                    scheduler.step()
            self.history["loss"].append(loss.detach())
            self.history["lr"].append(body.param_groups[0]["lr"])
            return loss

        def configure_optimizers(self) -> Any:
            opts = [torch.optim.Adam(self.net[0].parameters(), 0.01), torch.optim.NAdam(self.net[3].parameters(), 0.01)]
            return opts, [
                torch.optim.lr_scheduler.CyclicLR(opts[0], 1e-3, 1e-2, cycle_momentum=False),
                torch.optim.lr_scheduler.LinearLR(opts[1]),
            ]

    return made(Accumulates(), loader(vectors()))


@training
def accumulation_that_grows_by_epoch() -> Made:
    class Grows(_Classifier):
        def configure_optimizers(self) -> Any:
            return torch.optim.Adadelta(self.parameters(), 0.5)

    return made(Grows(_cnn()), loader(images(), 2), callbacks=[GradientAccumulationScheduler({0: 1, 1: 3})])
