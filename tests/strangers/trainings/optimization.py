"""Optimizers of other people, several of them, and what moves their rates and weights."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from strangers.table import Made, drawn_ints, images, loader, made, training, vectors


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


class _Lookahead(torch.optim.Optimizer):
    """As timm and pytorch_optimizer have it: no ``super().__init__()``."""

    def __init__(self, base: Any, alpha: float = 0.5, k: int = 3) -> None:
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = {}, {}
        self.alpha, self.k, self.base = alpha, k, base
        self.param_groups, self.defaults = base.param_groups, base.defaults
        self.state: dict[Any, Any] = defaultdict(dict)
        for group in self.param_groups:
            group["counter"] = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = self.base.step(closure)
        for group in self.param_groups:
            group["counter"] += 1
            if group["counter"] % self.k == 0:
                for p in group["params"]:
                    slow = self.state[p].setdefault("slow", p.detach().clone())
                    slow.add_(p - slow, alpha=self.alpha)
                    p.copy_(slow)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return self.base.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.base.load_state_dict(state)
        self.param_groups = self.base.param_groups


@training
def lookahead_without_super_init() -> Made:
    class Looks(_Classifier):
        def configure_optimizers(self) -> Any:
            return _Lookahead(torch.optim.RAdam(self.parameters(), 0.01))

    return made(Looks(_cnn()), loader(images()))


class _Lion(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in filter(lambda p: p.grad is not None, group["params"]):
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                update = state["exp_avg"].clone().lerp_(p.grad, 0.1)
                p.data.add_(update.tanh_(), alpha=-group["lr"])
                state["exp_avg"].lerp_(p.grad, 0.01)
        return loss


@training
def an_optimizer_with_a_state_of_its_own() -> Made:
    class Lions(_Classifier):
        def configure_optimizers(self) -> Any:
            return _Lion(self.parameters(), 3e-3)

    return made(Lions(_cnn()), loader(images()), gradient_clip_val=1.0)


@training
def sharpness_aware_by_two_closures() -> Made:
    class SAM(_Classifier):
        def __init__(self) -> None:
            super().__init__(_mlp())
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            opt = self.optimizers()
            first = F.cross_entropy(self.net(x), y)
            self.manual_backward(first)
            with torch.no_grad():
                norm = torch.norm(torch.stack([p.grad.norm(p=2) for p in self.net.parameters()]), p=2)
                moves = [p.grad * (0.05 / (norm + 1e-12)) for p in self.net.parameters()]
                for p, e in zip(self.net.parameters(), moves, strict=True):
                    p.add_(e)
            opt.zero_grad()
            self.manual_backward(F.cross_entropy(self.net(x), y))
            with torch.no_grad():
                for p, e in zip(self.net.parameters(), moves, strict=True):
                    p.sub_(e)
            opt.step()
            opt.zero_grad()
            return first

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)

    return made(SAM(), loader(vectors()))


@training(epochs=12)
def lbfgs_that_calls_its_closure_often() -> Made:
    class Newton(_Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            decay = sum(p.pow(2).sum() for p in self.parameters())
            return super().training_step(batch, batch_idx) + 1e-2 * decay

        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=4, history_size=5)

    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    return made(Newton(net), loader(vectors(), 24))


@training
def sparse_embeddings_with_sparse_adam() -> Made:
    class Words(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.u, self.v, self.scale = (
                nn.Embedding(30, 6, sparse=True),
                nn.Embedding(30, 6, sparse=True),
                nn.Linear(6, 6),
            )

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            (pairs,) = batch
            negatives = torch.randint(0, 30, (len(pairs), 3))
            u = self.scale(self.u(pairs[:, 0]))
            positive = F.logsigmoid((u * self.v(pairs[:, 1])).sum(1))
            negative = F.logsigmoid(-torch.bmm(self.v(negatives), u.unsqueeze(2)).squeeze(2)).sum(1)
            loss = -(positive + negative).mean()
            for opt in self.optimizers():
                opt.zero_grad()
            self.manual_backward(loss)
            for opt in self.optimizers():
                opt.step()
            return loss

        def configure_optimizers(self) -> Any:
            sparse = [*self.u.parameters(), *self.v.parameters()]
            return [torch.optim.SparseAdam(sparse, lr=0.05), torch.optim.Adagrad(self.scale.parameters(), 0.05)]

    return made(Words(), loader(TensorDataset(drawn_ints(30, 24, 2))))
