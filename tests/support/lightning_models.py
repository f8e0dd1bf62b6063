"""Small LightningModules, the data they train on, and what the plugin's tests measure of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

OptimizerFactory = Callable[[Any], Optimizer]


def sgd(parameters: Any) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


class Supervised(LightningModule):
    """A network, a loss against labels, an optimizer; it remembers the loss of every training step."""

    def __init__(self, net: nn.Module, optimizer: OptimizerFactory = sgd) -> None:
        super().__init__()
        self.net = net
        self.losses: list[float] = []
        self._optimizer = optimizer

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        logits = self(x)
        return F.cross_entropy(logits.flatten(0, -2), y.flatten())

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(float(loss.detach()))
        return loss

    @override
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    @override
    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))

    @override
    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])

    @override
    def configure_optimizers(self) -> Any:
        return self._optimizer([p for p in self.parameters() if p.requires_grad])


def cnn(channels: int = 8, classes: int = 4) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, channels, 3, padding=1),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.Conv2d(channels, channels, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(channels * 16, classes),
    )


def mlp(features: int = 8, classes: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Linear(features, 16), nn.Tanh(), nn.Linear(16, classes))


class Block(nn.Module):
    """A transformer block, attention written by hand."""

    def __init__(self, dim: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim), nn.Dropout(dropout))

    @override
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        weights = (q @ k.transpose(-2, -1) / q.size(-1) ** 0.5).softmax(-1)
        x = x + self.out(weights @ v)
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self, dim: int = 16, blocks: int = 3, vocabulary: int = 11, dropout: float = 0.1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dim)
        self.blocks = nn.ModuleList(Block(dim, dropout) for _ in range(blocks))
        self.head = nn.Linear(dim, vocabulary)

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def images(batches: int = 4, batch_size: int = 4) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(batches * batch_size, 3, 8, 8, generator=generator)
    y = torch.randint(0, 4, (batches * batch_size,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=batch_size)


def vectors(batches: int = 4, batch_size: int = 4, features: int = 8) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(batches * batch_size, features, generator=generator)
    y = torch.randint(0, 4, (batches * batch_size,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=batch_size)


def tokens(batches: int = 4, batch_size: int = 2, length: int = 6) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(0, 11, (batches * batch_size, length), generator=generator)
    return DataLoader(TensorDataset(x, (x + 1) % 11), batch_size=batch_size)


class Call(Callback):
    """Calls a function at one hook: ``Call(on_train_batch_end=print)``."""

    def __init__(self, **hooks: Callable[..., Any]) -> None:
        for name, function in hooks.items():
            assert hasattr(Callback, name), name
            setattr(self, name, function)


def footprint(module: nn.Module) -> dict[str, Any]:
    """What a run must leave as it was: identities, instance attributes, hooks, layouts."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks")
    found: dict[str, Any] = {}
    for name, part in module.named_modules():
        own = {k: v for k, v in vars(part).items() if k in ("forward", "inplace", "momentum")}
        found[name] = (id(part), type(part), own, {h: len(vars(part)[h]) for h in hooks}, part._compiled_call_impl)
    for name, parameter in module.named_parameters():
        found[name] = (id(parameter), parameter.stride(), parameter.dtype, parameter.is_inference())
    return found
