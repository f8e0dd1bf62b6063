"""Distances that are learnt, losses of the literature, and evaluation by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import CosineSimilarity, MeanMetric, MeanSquaredError, MetricCollection

from strangers.table import Made, images, loader, made, training, vectors


class _Embedder(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 8, 3, bias=False),
            nn.BatchNorm2d(8),
            nn.PReLU(8),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(8, 8),
        )

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=5e-3)


class _ArcFace(nn.Module):
    """As pytorch-metric-learning has it: the weight follows the dtype of what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.W = nn.Parameter(torch.randn(8, 4))

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        self.W.data = self.W.data.to(device=embeddings.device, dtype=embeddings.dtype)
        cosine = F.normalize(embeddings) @ F.normalize(self.W, dim=0)
        angles = torch.acos(cosine.clamp(-1 + 1e-4, 1 - 1e-4))
        onehot = F.one_hot(labels, 4).to(cosine.dtype)
        return F.cross_entropy(8 * torch.cos(angles + 0.2 * onehot), labels)


@training
def arcface_that_moves_its_own_weight() -> Made:
    class Faces(_Embedder):
        def __init__(self) -> None:
            super().__init__()
            self.loss = _ArcFace()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            return self.loss(self.net(x), y)

    return made(Faces(), loader(images()))


@training
def triplets_mined_in_the_batch() -> Made:
    class Triplets(_Embedder):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            z = self.net(x)
            d = torch.cdist(z, z)
            same = y[:, None] == y[None]
            hardest = (d * same).max(1).values
            closest = (d + 1e3 * same).min(1).values
            self.log("margin", (closest - hardest).mean(), prog_bar=True, logger=False)
            return F.relu(hardest - closest + 0.5).mean() + 1e-3 * z.pow(2).mean()

    return made(Triplets(), loader(images(), 6))


@training
def siamese_pairs_in_a_dictionary() -> Made:
    def collate(items: Any) -> dict[str, Any]:
        x, y = (torch.stack(part) for part in zip(*items, strict=True))
        return {
            "left": x,
            "right": x.roll(1, 0),
            "same": (y == y.roll(1, 0)).float(),
            "meta": {"name": ["pair"] * len(x)},
        }

    class Siamese(_Embedder):
        def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
            distance = F.pairwise_distance(self.net(batch["left"]), self.net(batch["right"]))
            same = batch["same"]
            return {
                "loss": (same * distance.pow(2) + (1 - same) * F.relu(1 - distance).pow(2)).mean(),
                "distance": distance.detach(),
            }

    return made(Siamese(), loader(images(), collate_fn=collate))


@training
def prototypes_of_episodes() -> Made:
    class Proto(_Embedder):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, _ = batch
            z = self.net(x).view(2, 4, -1)
            prototypes, queries = z[:, :2].mean(1), z[:, 2:].reshape(4, -1)
            target = torch.arange(2).repeat_interleave(2)
            return F.nll_loss(F.log_softmax(-(torch.cdist(queries, prototypes) ** 2), dim=1), target)

    return made(Proto(), loader(images(), 8))


@training
def centre_loss_with_an_optimizer_of_its_own() -> Made:
    class Centre(_Embedder):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.centres, self.head = nn.Parameter(torch.randn(4, 8)), nn.Linear(8, 4)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            z = self.net(x)
            loss = F.cross_entropy(self.head(z), y) + 0.1 * (z - self.centres[y]).pow(2).sum(1).mean()
            opt, opt_c = self.optimizers()
            opt.zero_grad()
            opt_c.zero_grad()
            self.manual_backward(loss)
            opt.step()
            self.centres.grad.data *= 10.0
            opt_c.step()
            return loss

        def configure_optimizers(self) -> Any:
            return [
                torch.optim.Adam([*self.net.parameters(), *self.head.parameters()], 0.01),
                torch.optim.SGD([self.centres], 0.05),
            ]

    return made(Centre(), loader(images()))


@training
def focal_loss_and_torchmetrics() -> Made:
    class Focal(_Embedder):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Sequential(nn.ReLU(), nn.Linear(8, 4))
            self.train_error = MeanSquaredError()
            self.metrics = MetricCollection({"mse": MeanSquaredError(), "cos": CosineSimilarity()}, prefix="val/")
            self.mean = MeanMetric()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            logits = self.head(self.net(x))
            ce = F.cross_entropy(logits, y, reduction="none")
            loss = ((1 - torch.exp(-ce)) ** 2 * ce).mean()
            self.train_error(logits.softmax(1), F.one_hot(y, 4).float())
            self.mean.update(loss)
            self.log("error", self.train_error, on_step=True, on_epoch=True)
            self.log("running", self.mean, on_epoch=True)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            x, y = batch
            self.metrics.update(self.head(self.net(x)).softmax(1), F.one_hot(y, 4).float())
            self.log_dict(self.metrics, on_epoch=True)

    return made(Focal(), loader(images()), loader(images(8), shuffle=False))


@training(bf16=False)
def neighbours_by_numpy_at_the_end_of_the_epoch() -> Made:
    class Neighbours(_Embedder):
        def __init__(self) -> None:
            super().__init__()
            self.bank, self.labels = [], []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            z = F.normalize(self.net(x), dim=1)
            self.bank.append(z.detach().numpy())
            self.labels.append(y.numpy())
            return {"loss": F.multi_margin_loss(z, y), "z": z.detach()}

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.last_mean = float(np.mean(outputs["z"].numpy()))

        def on_train_epoch_end(self) -> None:
            bank, labels = np.concatenate(self.bank), np.concatenate(self.labels)
            d = ((bank[:, None] - bank[None]) ** 2).sum(-1)
            np.fill_diagonal(d, np.inf)
            self.log("knn", float((labels[d.argmin(1)] == labels).mean()))
            self.bank, self.labels = [], []

    return made(Neighbours(), loader(images()))


@training
def hinges_and_hard_examples() -> Made:
    class Hard(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, 16), nn.Hardtanh(inplace=True), nn.Linear(16, 4))
            self.register_buffer("difficulty", torch.zeros(4))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            loss = F.multi_margin_loss(self.net(x), y, reduction="none", p=2)
            self.difficulty[y] = 0.5 * self.difficulty[y] + 0.5 * loss.detach()
            keep = loss.topk(max(1, len(loss) // 2)).indices
            return (loss[keep] * (1 + self.difficulty[y][keep])).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.ASGD(self.parameters(), 0.05)

    return made(Hard(), loader(vectors()))


@training
def teacher_and_student_at_a_temperature() -> Made:
    class Distil(_Embedder):
        def __init__(self) -> None:
            super().__init__()
            teacher = nn.Sequential(nn.Conv2d(3, 12, 3), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(432, 8))
            self.teacher = [teacher.eval()]  # in a list: no child of ours

        @torch.no_grad()
        def soft(self, x: Tensor) -> Tensor:
            return self.teacher[0](x).div(4).softmax(1)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            z = self.net(x)
            kl = F.kl_div(F.log_softmax(z / 4, 1), self.soft(x), reduction="batchmean") * 16
            self.cos = 0.5 * (1 + math.cos(math.pi * self.global_step / 20))
            return self.cos * kl + (1 - self.cos) * F.cross_entropy(z, y)

    return made(Distil(), loader(images()))
