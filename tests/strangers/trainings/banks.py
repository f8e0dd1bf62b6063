"""What earlier steps have seen, kept where later ones find it."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F

from strangers.table import Made, images, loader, made, training, vectors


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


_BANK: list[Tensor] = []


@training(resumes=False)
def memory_bank_in_a_global_list() -> Made:
    _BANK.clear()

    class Banked(_SelfSupervised):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            z = F.normalize(self.encoder(batch[0]), dim=1)
            loss = z.pow(2).mean()
            if _BANK:
                bank = torch.cat(_BANK[-3:])
                loss = loss + torch.logsumexp(z @ bank.t() / 0.5, dim=1).mean()
            _BANK.append(z.detach())
            return loss

    return made(Banked(), loader(images()), elsewhere=_BANK)


@training(resumes=False)
def memory_bank_in_a_closure() -> Made:
    bank: dict[int, Tensor] = {}

    def remember(labels: Tensor, features: Tensor) -> Tensor:
        distance = features.new_zeros(())
        for label, feature in zip(labels.tolist(), features, strict=True):
            if label in bank:
                distance = distance + F.mse_loss(feature, bank[label])
                bank[label] = 0.9 * bank[label] + 0.1 * feature.detach()
            else:
                bank[label] = feature.detach()
        return distance

    class Centres(_SelfSupervised):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            z = self.encoder(x)
            return remember(y, z) + F.cross_entropy(z, y)

    return made(Centres(), loader(images()), elsewhere=bank)


@training
def memory_bank_in_a_plain_object() -> Made:
    class Bank:
        def __init__(self, size: int, dim: int) -> None:
            self.features, self.labels, self.at = torch.zeros(size, dim), torch.full((size,), -1), 0

        def push(self, features: Tensor, labels: Tensor) -> None:
            for f, y in zip(features, labels, strict=True):
                self.features[self.at], self.labels[self.at] = f, y
                self.at = (self.at + 1) % len(self.features)

    class XBM(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 8))
            self.bank = Bank(12, 8)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            z = F.normalize(self.net(x), dim=-1)
            self.bank.push(z.detach(), y)
            sims = z.matmul(self.bank.features.t())
            same = y[:, None] == self.bank.labels[None]
            return F.relu(sims[~same] - 0.3).mean() + (1 - sims[same]).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), 1e-2)

    return made(XBM(), loader(vectors()))


@training
def swav_with_sinkhorn() -> Made:
    class SwAV(_SelfSupervised):
        def __init__(self) -> None:
            super().__init__()
            self.prototypes = nn.Linear(16, 6, bias=False)

        @torch.no_grad()
        def sinkhorn(self, out: Tensor) -> Tensor:
            q = torch.exp(out / 0.5).t()
            q /= q.sum()
            for _ in range(3):
                q /= q.sum(dim=1, keepdim=True)
                q /= q.shape[0]
                q /= q.sum(dim=0, keepdim=True)
                q /= q.shape[1]
            return (q * q.shape[1]).t()

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            with torch.no_grad():
                self.prototypes.weight.copy_(F.normalize(self.prototypes.weight.data.clone(), dim=1, p=2))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            one, other = (self.prototypes(F.normalize(self.encoder(_augment(batch[0])), dim=1)) for _ in range(2))
            q_one, q_other = self.sinkhorn(one.detach()), self.sinkhorn(other.detach())
            return (
                -(q_one * F.log_softmax(other / 0.1, 1)).sum(1).mean()
                - (q_other * F.log_softmax(one / 0.1, 1)).sum(1).mean()
            )

    return made(SwAV(), loader(images()))
