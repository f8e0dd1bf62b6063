"""Self-supervision: views by augmentation, queues, teachers that follow."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.nn import functional as F

from strangers.table import Made, images, loader, made, training


def _encoder(out: int = 16) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, out),
    )


def _augment(x: Tensor) -> Tensor:
    x = torch.where(torch.rand(len(x), 1, 1, 1) < 0.5, x.flip(-1), x)
    return x + 0.1 * torch.randn_like(x)


class _SelfSupervised(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = _encoder()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=3e-3)


@training
def simclr() -> Made:
    class SimCLR(_SelfSupervised):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, _ = batch
            z = F.normalize(self.encoder(torch.cat([_augment(x), _augment(x)])), dim=-1)
            similarity = z @ z.t() / 0.2
            similarity.masked_fill_(torch.eye(len(z), dtype=torch.bool), -9e15)
            positive = torch.arange(len(z)).roll(len(x))
            loss = F.cross_entropy(similarity, positive)
            self.log("nll", loss)
            return loss

    return made(SimCLR(), loader(images()))


@training
def simclr_augmented_after_the_transfer() -> Made:
    class SimCLR(_SelfSupervised):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            x, y = batch
            return (_augment(x), _augment(x), y) if self.training else batch

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            one, other, _ = batch
            logits = F.normalize(self.encoder(one), dim=1) @ F.normalize(self.encoder(other), dim=1).T
            labels = torch.arange(logits.shape[0])
            return (F.cross_entropy(logits / 0.1, labels) + F.cross_entropy(logits.T / 0.1, labels)) / 2

    return made(SimCLR(), loader(images()))


@training
def moco_with_a_queue() -> Made:
    class MoCo(_SelfSupervised):
        def __init__(self) -> None:
            super().__init__()
            self.encoder_k = copy.deepcopy(self.encoder)
            for p in self.encoder_k.parameters():
                p.requires_grad = False
            self.register_buffer("queue", F.normalize(torch.randn(16, 12), dim=0))
            self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

        @torch.no_grad()
        def _enqueue(self, keys: Tensor) -> None:
            ptr = int(self.queue_ptr)
            self.queue[:, ptr : ptr + len(keys)] = keys.T
            self.queue_ptr[0] = (ptr + len(keys)) % self.queue.shape[1]

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, _ = batch
            q = F.normalize(self.encoder(_augment(x)), dim=1)
            with torch.no_grad():
                for p_q, p_k in zip(self.encoder.parameters(), self.encoder_k.parameters(), strict=True):
                    p_k.data = p_k.data * 0.9 + p_q.data * 0.1
                shuffle = torch.randperm(x.shape[0])
                k = F.normalize(self.encoder_k(_augment(x)[shuffle]), dim=1)[torch.argsort(shuffle)]
            l_pos = torch.einsum("nc,nc->n", [q, k]).unsqueeze(-1)
            l_neg = torch.einsum("nc,ck->nk", [q, self.queue.clone().detach()])
            logits = torch.cat([l_pos, l_neg], dim=1) / 0.07
            self._enqueue(k)
            return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))

    return made(MoCo(), loader(images()))


@training
def byol() -> Made:
    class BYOL(_SelfSupervised):
        def __init__(self) -> None:
            super().__init__()
            self.target = copy.deepcopy(self.encoder).requires_grad_(False)
            self.predictor = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, _ = batch
            one, other = _augment(x), _augment(x)
            with torch.no_grad():
                t1, t2 = self.target(one), self.target(other)
            p1, p2 = self.predictor(self.encoder(one)), self.predictor(self.encoder(other))
            return -(F.cosine_similarity(p1, t2).mean() + F.cosine_similarity(p2, t1).mean())

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            for online, target in zip(self.encoder.parameters(), self.target.parameters(), strict=True):
                target.data.lerp_(online.data, 0.01)

    return made(BYOL(), loader(images()))


@training
def barlow_twins() -> Made:
    class BarlowTwins(_SelfSupervised):
        def __init__(self) -> None:
            super().__init__()
            self.projector = nn.Sequential(nn.Linear(16, 24), nn.BatchNorm1d(24), nn.ReLU(True), nn.Linear(24, 12))
            self.bn = nn.BatchNorm1d(12, affine=False)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, _ = batch
            z1, z2 = (self.projector(self.encoder(_augment(x))) for _ in range(2))
            c = self.bn(z1).T @ self.bn(z2)
            c.div_(len(x))
            on = torch.diagonal(c).add_(-1).pow_(2).sum()
            n = c.shape[0]
            off = c.flatten()[:-1].view(n - 1, n + 1)[:, 1:].flatten().pow_(2).sum()
            return on + 0.005 * off

    return made(BarlowTwins(), loader(images()))


@training
def vicreg_gathered_by_numpy() -> Made:
    class VICReg(_SelfSupervised):
        def __init__(self) -> None:
            super().__init__()
            self.seen = []

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, _ = batch
            a, b = self.encoder(_augment(x)), self.encoder(_augment(x))
            self.seen.append(a.detach().cpu().numpy())
            std = F.relu(1 - (a.var(dim=0) + 1e-4).sqrt()).mean() + F.relu(1 - (b.var(dim=0) + 1e-4).sqrt()).mean()
            a_c, b_c = a - a.mean(dim=0), b - b.mean(dim=0)
            cov = sum((c.T @ c / (len(x) - 1)).fill_diagonal_(0).pow(2).sum() for c in (a_c, b_c)) / 16
            return 25 * F.mse_loss(a, b) + 25 * std + cov

        def on_train_epoch_end(self) -> None:
            every = np.concatenate(self.seen)
            self.log("spread", float(every.std()))
            self.seen.clear()

    return made(VICReg(), loader(images()))


@training
def mean_teacher_by_callback() -> Made:
    class Follow(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            step = trainer.global_step
            alpha = min(1 - 1 / (step + 1), 0.9)
            student, teacher = pl_module.student.state_dict(), pl_module.teacher.state_dict()
            for name, value in teacher.items():
                if value.dtype.is_floating_point:
                    value.mul_(alpha).add_(student[name], alpha=1 - alpha)

    class MeanTeacher(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.student = _encoder(4)
            self.teacher = copy.deepcopy(self.student)
            for p in self.teacher.parameters():
                p.detach_()

        def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
            x, y = batch
            logits = self.student(x + 0.1 * torch.randn_like(x))
            with torch.no_grad():
                soft = self.teacher(x + 0.1 * torch.randn_like(x)).softmax(dim=1)
            consistency = F.mse_loss(logits.softmax(1), soft)
            loss = F.cross_entropy(logits[:2], y[:2]) + self.current_epoch * consistency
            return {"loss": loss, "logits": logits.detach(), "soft": soft}

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.student.parameters(), lr=0.05, momentum=0.9, nesterov=True)

    return made(MeanTeacher(), loader(images()), callbacks=[Follow()])
