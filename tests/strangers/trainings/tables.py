"""Rows and columns: embeddings of categories, recommenders, several tasks."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset, WeightedRandomSampler, random_split

from strangers.table import Made, drawn, drawn_ints, loader, made, training, vectors


class Row(NamedTuple):
    numbers: Tensor
    categories: Tensor
    target: Tensor


class _Rows(Dataset[Row]):
    def __init__(self, noisy: bool = False) -> None:
        self.x, self.c, self.noisy = drawn(24, 5), drawn_ints(6, 24, 3), noisy
        self.y = (self.x.sum(1) > 0).float()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Row:
        x = self.x[i]
        if self.noisy:
            x = x + torch.from_numpy(np.random.normal(0, 0.05, size=5)).float()
        return Row(x, self.c[i], self.y[i])


class _Tabular(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"dim": 4})
        self.embeds = nn.ModuleList(nn.Embedding(6, 4) for _ in range(3))
        self.bn, self.drop = nn.BatchNorm1d(5), nn.Dropout(0.1)
        self.mlp = nn.Sequential(
            nn.Linear(17, 24), nn.ReLU(inplace=True), nn.BatchNorm1d(24), nn.Dropout(0.2), nn.Linear(24, 1)
        )

    def forward(self, row: Row) -> Tensor:
        cats = torch.cat([e(row.categories[:, i]) for i, e in enumerate(self.embeds)], 1)
        return self.mlp(torch.cat([self.drop(cats), self.bn(row.numbers)], 1)).squeeze(1)

    def training_step(self, row: Row, batch_idx: int) -> Tensor:
        return F.binary_cross_entropy_with_logits(self(row), row.target)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 0.01)


@training
def tabular_with_named_tuples_and_numpy_noise() -> Made:
    return made(_Tabular(), loader(_Rows(noisy=True), 6))


@training
def tabular_with_a_weighted_sampler() -> Made:
    sampler = WeightedRandomSampler([1.0 + (i % 3) for i in range(24)], 24)
    return made(_Tabular(), DataLoader(_Rows(), batch_size=4, sampler=sampler))


@training
def tabular_in_a_datamodule_that_reloads() -> Made:
    class Rows(LightningDataModule):
        def setup(self, stage: str) -> None:
            self.train, self.val = random_split(_Rows(), [18, 6], generator=torch.Generator().manual_seed(1))

        def train_dataloader(self) -> Any:
            return DataLoader(
                self.train,
                batch_size=6,
                shuffle=True,
                generator=torch.Generator().manual_seed(self.trainer.current_epoch),
            )

        def val_dataloader(self) -> Any:
            return DataLoader(self.val, batch_size=6)

    class Validated(_Tabular):
        def validation_step(self, row: Row, batch_idx: int) -> Tensor:
            loss = F.binary_cross_entropy_with_logits(self(row), row.target)
            self.log("val/loss", loss)
            return loss

    return made(Validated(), Rows(), reload_dataloaders_every_n_epochs=1)


@training
def matrix_factorisation_with_biases() -> Made:
    class Factors(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.users, self.items = nn.Embedding(12, 6), nn.Embedding(15, 6)
            self.b_u, self.b_i = nn.Embedding(12, 1), nn.Embedding(15, 1)
            self.mu = nn.Parameter(torch.zeros(()))
            for e in (self.users, self.items):
                nn.init.normal_(e.weight, std=0.1)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            (pair, rating) = batch
            u, i = pair[:, 0] % 12, pair[:, 1]
            dot = (self.users(u) * self.items(i)).sum(1) + (self.b_u(u) + self.b_i(i)).squeeze(1) + self.mu
            reg = 1e-3 * (self.users(u).norm() + self.items(i).norm())
            self.log("rmse", F.mse_loss(dot, rating).sqrt(), on_step=False, on_epoch=True)
            return F.mse_loss(dot, rating) + reg

        def configure_optimizers(self) -> Any:
            return torch.optim.Adagrad(self.parameters(), 0.1)

    return made(Factors(), loader(TensorDataset(drawn_ints(15, 24, 2), drawn(24)), 6))


@training
def ranking_with_negatives_by_python() -> Made:
    class BPR(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.users, self.items = nn.Embedding(15, 6), nn.EmbeddingBag(15, 6, mode="mean")

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            (pairs,) = batch
            negative = torch.tensor([random.choice([i for i in range(15) if i != int(p)]) for p in pairs[:, 1]])
            u = self.users(pairs[:, 0])
            x = (u * self.items(pairs[:, 1:])).sum(1) - (u * self.items(negative[:, None])).sum(1)
            return -F.logsigmoid(x).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.5)

    return made(BPR(), loader(TensorDataset(drawn_ints(15, 24, 2))))


@training
def several_tasks_weighed_by_uncertainty() -> Made:
    class Tasks(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.trunk, self.heads = nn.Linear(8, 16), nn.ModuleDict({"a": nn.Linear(16, 4), "b": nn.Linear(16, 1)})
            self.log_vars = nn.Parameter(torch.zeros(2))
            self.weights_seen: list[float] = []

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            h = F.gelu(self.trunk(x), approximate="tanh")
            losses = [F.cross_entropy(self.heads["a"](h), y), F.mse_loss(self.heads["b"](h)[:, 0], x.sum(1))]
            total = sum(torch.exp(-v) * loss + v for v, loss in zip(self.log_vars, losses, strict=True))
            self.weights_seen.append(self.log_vars[0].item())
            return total

        def on_after_backward(self) -> None:
            norms = [p.grad.norm().item() for p in self.trunk.parameters()]
            self.log("grad_norm", sum(norms))

        def configure_optimizers(self) -> Any:
            return torch.optim.RMSprop(self.parameters(), 1e-2, momentum=0.5)

    return made(Tasks(), loader(vectors()))


@training
def mixture_of_densities() -> Made:
    class MDN(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.pi, self.mu, self.sigma = nn.Linear(8, 3), nn.Linear(8, 3), nn.Linear(8, 3)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            mix = torch.distributions.Categorical(logits=self.pi(x))
            comp = torch.distributions.Normal(self.mu(x), F.softplus(self.sigma(x)) + 1e-3)
            return -torch.distributions.MixtureSameFamily(mix, comp).log_prob(y.float()).mean()

        def configure_optimizers(self) -> Any:
            return {"optimizer": torch.optim.Adam(self.parameters(), 0.02, amsgrad=True)}

    return made(MDN(), loader(vectors()))


@training
def k_means_on_learnt_features() -> Made:
    class Deep(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.centres = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 4)), None
            self.counts = torch.ones(3)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            z = self.net(batch[0])
            if self.centres is None:
                self.centres = z[:3].detach().clone()
            d = torch.cdist(z, self.centres.clone())
            assigned = d.detach().argmin(1)
            for c in range(3):
                if (assigned == c).any():
                    self.counts[c] += (assigned == c).sum()
                    self.centres[c] += (z[assigned == c].detach().mean(0) - self.centres[c]) / self.counts[c]
            return d.gather(1, assigned[:, None]).pow(2).mean() + F.mse_loss(z.std(0), torch.ones(4))

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), 5e-3)

    return made(Deep(), loader(vectors()))
