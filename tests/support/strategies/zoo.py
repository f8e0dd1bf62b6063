"""Models that several processes must train as one process does, each with its data and what its Trainer needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from typing_extensions import override

from support.strategies.gan import Gan
from support.strategies.learners import (
    VOCABULARY,
    Classifier,
    Frozen,
    Grouped,
    IsTheModel,
    Learner,
    NeverCalled,
    Scheduled,
    Sometimes,
    TiedTransformer,
    Unfrozen,
    Unused,
)

SAMPLES, BATCH_SIZE = 32, 8

# -- data --------------------------------------------------------------------------------------------------------------


def sentences() -> TensorDataset:
    x = torch.randint(0, VOCABULARY, (SAMPLES, 6), generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, (x + 1) % VOCABULARY)


def pictures() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    y = torch.randint(0, 4, (SAMPLES,), generator=generator)
    return TensorDataset(torch.randn(SAMPLES, 3, 8, 8, generator=generator) + y[:, None, None, None] / 4, y)


def ring() -> TensorDataset:
    """Points on a circle, and noise to make such points from: the ranks' noise is one process's noise."""
    generator = torch.Generator().manual_seed(1)
    angle = 2 * torch.pi * torch.rand(SAMPLES, generator=generator)
    return TensorDataset(torch.stack([angle.cos(), angle.sin()], dim=1), torch.randn(SAMPLES, 4, generator=generator))


class InOrder(LightningDataModule):
    """Batches in order: what the ranks get together is what one process gets with batches as large as all theirs."""

    def __init__(self, dataset: TensorDataset) -> None:
        super().__init__()
        self.dataset = dataset

    def train_dataloader(self) -> DataLoader[Any]:
        # Lightning itself would shuffle, so this does as it does but for that.
        ranks = self._trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        return self._loader(sampler=DistributedSampler(self.dataset, shuffle=False, **ranks))

    def val_dataloader(self) -> DataLoader[Any]:
        return self._loader()

    test_dataloader = predict_dataloader = val_dataloader

    def _loader(self, **options: Any) -> DataLoader[Any]:
        return Resumable(self.dataset, batch_size=BATCH_SIZE // self._trainer.world_size, **options)

    @property
    def _trainer(self) -> Trainer:
        assert self.trainer is not None
        return self.trainer


class Resumable(DataLoader[Any]):
    """Goes on in mid-epoch: its state is the number of batches it has given since the epoch began."""

    given = 0
    to_skip = 0

    @override
    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self.given, skipped, self.to_skip = self.to_skip, self.to_skip, 0
        for number, batch in enumerate(super().__iter__()):
            if number >= skipped:
                self.given = number + 1
                yield batch

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.to_skip = state["given"] % len(self)


# -- the table ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A model of the zoo: how it is made, what it learns, what its Trainer and ``AccelDDPStrategy`` need."""

    module: Callable[..., Any]
    dataset: Callable[[], TensorDataset] = sentences
    trainer: dict[str, Any] = field(default_factory=dict)
    ddp: dict[str, Any] = field(default_factory=dict)


KINDS = {
    "transformer": Kind(module=lambda: Learner(TiedTransformer())),
    "cnn": Kind(module=Classifier, dataset=pictures, trainer={"sync_batchnorm": True}),
    "gan": Kind(module=Gan, dataset=ring),
    "scheduler": Kind(module=lambda: Scheduled(TiedTransformer())),
    "frozen": Kind(module=lambda: Frozen(TiedTransformer())),
    "groups": Kind(module=lambda: Grouped(TiedTransformer())),
    "unfrozen": Kind(module=lambda: Unfrozen(TiedTransformer())),
    "unused": Kind(module=lambda: Unused(TiedTransformer())),
    "sometimes": Kind(module=lambda: Sometimes(TiedTransformer()), ddp={"find_unused_parameters": True}),
    "is the model": Kind(module=IsTheModel),
    "never called": Kind(module=NeverCalled),
}

# What is varied: arguments of the Trainer, and of the plugin. The GAN, which steps by hand, takes the former itself.
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "accumulation": ({"accumulate_grad_batches": 2}, {}),
    "clipping": ({"gradient_clip_val": 0.1}, {}),
    "checkpointing": ({}, {"gradient_checkpointing": "full"}),
    # Four batches an epoch: the last step takes what one batch gave.
    "all": ({"accumulate_grad_batches": 3, "gradient_clip_val": 0.1}, {"gradient_checkpointing": "full"}),
}


def make(kind: str, variant: str) -> tuple[LightningModule, InOrder, dict[str, Any]]:
    """A model of the zoo, always with the same weights, its data, and the arguments of its Trainer."""
    entry, options = KINDS[kind], VARIANTS[variant][0]
    torch.manual_seed(0)
    if kind == "gan":
        module = entry.module(options.get("accumulate_grad_batches", 1), options.get("gradient_clip_val"))
        return module, InOrder(entry.dataset()), dict(entry.trainer)
    return entry.module(), InOrder(entry.dataset()), {**entry.trainer, **options}
