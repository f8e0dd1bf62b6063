"""Agents, quantisation, pruning, boxes: what fits nowhere else."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize, prune

from strangers.table import Items, Made, drawn, drawn_ints, images, loader, made, training, vectors


class _Walk:
    """A walker on a line, who wants to the right."""

    def reset(self) -> Tensor:
        self.at = 0.0
        return torch.tensor([self.at, 1.0])

    def step(self, action: int) -> tuple[Tensor, float, bool]:
        self.at += 0.3 if action else -0.3
        return torch.tensor([self.at, 1.0]), self.at, abs(self.at) > 1


@training
def quantisation_aware_with_observers_that_grow() -> Made:
    class Observer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("min_val", torch.tensor([]))
            self.register_buffer("max_val", torch.tensor([]))

        def forward(self, x: Tensor) -> Tensor:
            flat = x.detach().transpose(0, 1).flatten(1)
            low, high = flat.amin(1), flat.amax(1)
            if self.min_val.numel() == 0:
                self.min_val.resize_(low.shape)
                self.max_val.resize_(high.shape)
                self.min_val.copy_(low)
                self.max_val.copy_(high)
            else:
                self.min_val.copy_(torch.min(self.min_val, low))
                self.max_val.copy_(torch.max(self.max_val, high))
            scale = ((self.max_val - self.min_val) / 255).clamp(min=1e-6).float()
            zero = (-self.min_val / scale).round().clamp(0, 255).int()
            return torch.fake_quantize_per_channel_affine(x.float(), scale, zero, 1, 0, 255)

    class QAT(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.obs1, self.conv2, self.obs2 = (
                nn.Conv2d(3, 8, 3),
                Observer(),
                nn.Conv2d(8, 8, 3),
                Observer(),
            )
            self.fc = nn.Linear(8 * 16, 4)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            x = self.obs1(F.relu(self.conv1(x)))
            x = self.obs2(F.relu(self.conv2(x)))
            return F.cross_entropy(self.fc(x.flatten(1)), y)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.02, momentum=0.9)

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            for name, value in checkpoint["state_dict"].items():
                if name.endswith("_val"):
                    self.get_buffer(name).resize_(value.shape)

    return made(QAT(), loader(images()))


@training
def torch_ao_fake_quantisation_resized_in_the_run() -> Made:
    class Learned(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
            self.register_buffer("history", torch.zeros(1))
            self.step_size = nn.Parameter(torch.tensor(0.1))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            h = self.net[:2](x)
            self.history.resize_(self.history.numel() + 1)
            self.history[-1] = h.detach().abs().max()
            q = torch.fake_quantize_per_tensor_affine(h.float(), float(self.history.max()) / 127 + 1e-6, 0, -128, 127)
            w = self.net[2].weight / self.step_size
            w = ((w.round() - w).detach() + w) * self.step_size
            return F.cross_entropy(F.linear(q.to(w.dtype), w, self.net[2].bias), y)

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.history.resize_(checkpoint["state_dict"]["history"].shape)

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), 5e-3)

    return made(Learned(), loader(vectors()))


@training
def spectral_norm_and_orthogonal_weights() -> Made:
    class Symmetric(nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            return w.triu() + w.triu(1).transpose(-1, -2)

    class Constrained(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.utils.parametrizations.spectral_norm(nn.Conv2d(3, 8, 3))
            self.b = nn.utils.parametrizations.orthogonal(nn.Linear(8, 8))
            self.c = nn.Linear(8, 8)
            parametrize.register_parametrization(self.c, "weight", Symmetric())
            self.d = nn.utils.spectral_norm(nn.Linear(8, 4))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            h = F.celu(self.a(x), inplace=True).mean(dim=(2, 3))
            with parametrize.cached():
                h = F.softsign(self.c(self.b(h)))
            return F.cross_entropy(self.d(h), y)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.05)

    return made(Constrained(), loader(images()))


@training(resumes=False)
def pruned_between_epochs() -> Made:
    class Lottery(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
            prune.identity(self.net[0], "weight")

        def on_train_epoch_end(self) -> None:
            prune.l1_unstructured(self.net[0], "weight", amount=0.2)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            return F.cross_entropy(self.net(x), y)

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), 1e-2)

    return made(Lottery(), loader(vectors()))


@training
def boxes_in_lists_of_targets() -> Made:
    def collate(items: Any) -> Any:
        return tuple(zip(*items, strict=True))

    class Detector(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(
                nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(inplace=True)
            )
            self.cls, self.reg = nn.Conv2d(8, 3, 1), nn.Conv2d(8, 4, 1)
            grid = torch.stack(torch.meshgrid(torch.arange(4.0), torch.arange(4.0), indexing="ij"), -1).view(-1, 2)
            self.register_buffer("anchors", grid * 2 + 1)

        def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
            pictures, targets = batch
            h = self.body(torch.stack(pictures))
            scores, boxes = (
                self.cls(h).permute(0, 2, 3, 1).reshape(len(h), 16, 3),
                self.reg(h).permute(0, 2, 3, 1).reshape(len(h), 16, 4),
            )
            losses = {"cls": 0, "reg": 0}
            for score, box, target in zip(scores, boxes, targets, strict=True):
                d = torch.cdist(self.anchors, target["boxes"][:, :2])
                matched = d.argmin(0)
                labels = torch.zeros(16, dtype=torch.long)
                labels[matched] = target["labels"]
                losses["cls"] = losses["cls"] + F.cross_entropy(score, labels)
                losses["reg"] = losses["reg"] + F.smooth_l1_loss(box[matched], target["boxes"])
            return {"loss": sum(losses.values()) / len(h), **{k: v.detach() for k, v in losses.items()}}

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.01, momentum=0.9)

    items = [
        (
            drawn(3, 8, 8, seed=i),
            {"boxes": drawn(1 + i % 3, 4, seed=i).abs() * 3, "labels": 1 + drawn_ints(2, 1 + i % 3, seed=i)},
        )
        for i in range(24)
    ]
    return made(Detector(), loader(Items(items), collate_fn=collate))


@training
def heatmaps_and_soft_arguments() -> Made:
    class Pose(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(
                nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv2d(8, 2, 3, padding=1)
            )
            self.grid = torch.linspace(-1, 1, 8)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, _ = batch
            heat = self.net(x).flatten(2).softmax(-1).view(len(x), 2, 8, 8)
            px, py = (heat.sum(2) * self.grid).sum(-1), (heat.sum(3) * self.grid).sum(-1)
            moved = F.grid_sample(
                x, torch.stack([px, py], -1)[:, :, None].float().expand(-1, -1, 3, -1), align_corners=False
            )
            return (
                F.l1_loss(px, x.mean((1, 2, 3), keepdim=False)[:, None].expand_as(px))
                + py.pow(2).mean()
                + 0.1 * moved.mean()
            )

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), 1e-2)

    return made(Pose(), loader(images()))


@training
def cellular_automaton_with_a_pool() -> Made:
    """As in "Growing neural cellular automata": states that steps leave are where later steps begin."""

    class Automaton(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.update = nn.Sequential(nn.Conv2d(12, 16, 1), nn.ReLU(), nn.Conv2d(16, 4, 1, bias=False))
            sobel = torch.tensor([[-1.0, 0, 1], [-2, 0, 2], [-1, 0, 1]]) / 8
            kernel = torch.stack([torch.tensor([[0.0, 0, 0], [0, 1, 0], [0, 0, 0]]), sobel, sobel.t()]).repeat(4, 1, 1)
            self.register_buffer("kernel", kernel[:, None])
            self.pool = torch.zeros(16, 4, 8, 8)
            self.pool[:, :, 4, 4] = 1.0

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            target = batch[0][:, :1].tanh()
            index = torch.from_numpy(np.random.choice(16, len(target), replace=False))
            x = self.pool[index]
            for _ in range(np.random.randint(3, 6)):
                alive = (torch.rand(len(x), 1, 8, 8) <= 0.5).float()
                x = x + self.update(F.conv2d(x, self.kernel, padding=1, groups=4)) * alive
            self.pool[index] = x.detach().to(self.pool.dtype)
            return F.mse_loss(x[:, :1], target)

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), 2e-3)

    return made(Automaton(), loader(images()))
