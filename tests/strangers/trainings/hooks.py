"""Hooks and callbacks that keep, read and change what a run goes through."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.nn import functional as F

from strangers.table import Made, images, loader, made, training, vectors


class _Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 5e-3)


def _conv() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, 4),
    )


@training
def outputs_in_a_list_cleared_by_the_epoch() -> Made:
    class Collects(_Net):
        def __init__(self) -> None:
            super().__init__()
            self.training_step_outputs: list[dict[str, Tensor]] = []

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            logits = self.net(x)
            loss = F.cross_entropy(logits, y)
            self.training_step_outputs.append({"loss": loss.detach(), "logits": logits.detach(), "y": y})
            return loss

        def on_train_epoch_end(self) -> None:
            logits = torch.cat([o["logits"] for o in self.training_step_outputs])
            y = torch.cat([o["y"] for o in self.training_step_outputs])
            self.log("acc", (logits.argmax(1) == y).float().mean(), prog_bar=True)
            self.training_step_outputs.clear()

    return made(Collects(), loader(vectors()))


@training(bf16=False)
def outputs_read_by_numpy_in_a_callback() -> Made:
    class Reads(Callback):
        def __init__(self) -> None:
            self.rows: list[Any] = []

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.rows.append(outputs["features"].numpy().mean(axis=(0, 2, 3)))
            pl_module.mean_feature = torch.from_numpy(np.stack(self.rows).mean(0))

    class Gives(_Net):
        def __init__(self) -> None:
            super().__init__()
            self.net = _conv()

        def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
            x, y = batch
            h = self.net[:3](x)
            return {"loss": F.cross_entropy(self.net[3:](h), y), "features": h.detach()}

    return made(Gives(), loader(images()), callbacks=[Reads()])


@training
def activations_kept_by_hooks() -> Made:
    class Hooks(_Net):
        def __init__(self) -> None:
            super().__init__()
            self.kept: list[Tensor] = []
            self.grads: dict[str, Tensor] = {}
            self.net[1].register_forward_hook(lambda m, a, out: self.kept.append(out.detach()))
            self.net[3].register_full_backward_hook(lambda m, gi, go: self.grads.update(out=go[0].clone()))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            penalty = sum(k.mean() for k in self.kept[-2:])
            return loss + 1e-3 * penalty

        def on_train_epoch_end(self) -> None:
            self.log("dead", (torch.cat(self.kept) == 0).float().mean())
            self.kept.clear()

    return made(Hooks(), loader(vectors()))


@training
def a_callback_that_reads_the_module() -> Made:
    class Reads(Callback):
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            norms = {name: p.grad.data.norm(2) for name, p in pl_module.named_parameters() if p.grad is not None}
            pl_module.log("largest", max(norms.values()))

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            pl_module.epoch_weights = [pl_module.net[0].weight.data.clone()]
            pl_module.log("temperature", pl_module.temperature)
            pl_module.temperature *= 0.9

    class Tempered(_Net):
        temperature = 2.0

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            return F.cross_entropy(self.net(x) / self.temperature, y)

    return made(Tempered(), loader(vectors()), callbacks=[Reads()])


@training
def a_copy_of_itself_in_the_run() -> Made:
    class Copies(_Net):
        def __init__(self) -> None:
            super().__init__()
            self.best: Any = None
            self.lowest = float("inf")

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if float(outputs["loss"]) < self.lowest:
                self.lowest = float(outputs["loss"])
                self.best = copy.deepcopy(self.net.state_dict())
                self.twin = [copy.deepcopy(self.net)]

        def on_train_epoch_end(self) -> None:
            self.log("distance", (self.twin[0][0].weight - self.net[0].weight).norm())

    return made(Copies(), loader(vectors()))


@training(resumes=False)
def a_module_swapped_in_the_run() -> Made:
    class Grows(_Net):
        def __init__(self) -> None:
            super().__init__()
            self.net = _conv()

        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                old = self.net[3]
                new = nn.Conv2d(8, 12, 3, padding=1)
                with torch.no_grad():
                    new.weight[:8], new.bias[:8] = old.weight, old.bias
                self.net[3] = new
                self.net[6] = nn.Linear(768, 4)
                self.trainer.strategy.setup_optimizers(self.trainer)

    return made(Grows(), loader(images()))
