"""Architectures as they are in use, of transformers and in the manner of timm: with every default on, the plain run."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_accel import AccelPlugin
from support.architectures import ARCHITECTURES, Architecture
from support.hostile_parts import Row, Watched, see
from support.hostile_runs import differences, train
from support.techniques.flash_attention.huggingface_runs import IS_4
from support.timm_like import CLASSES, NETWORKS, SIDE

STEPS = 2


class Pretrains(Watched):
    """Trains a model of transformers by its own loss, to which everything that it was asked for adds."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__(architecture.make())
        self.architecture = architecture

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self.net(**batch, **self.architecture.asked)
        loss = out.loss
        for name, value in out.items():
            if isinstance(value, tuple):
                tensors = [part for part in value if isinstance(part, Tensor) and part.requires_grad]
                see(name, [tuple(tensor.shape) for tensor in tensors])
                loss = loss + sum(tensor.square().mean() for tensor in tensors)
        return self.noted(loss)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def train_dataloader(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(1)
        return DataLoader([self.architecture.batch(generator) for _ in range(STEPS)], batch_size=None)


class Classifies(Watched):
    def train_dataloader(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(STEPS, 4, 3, SIDE, SIDE, generator=generator)
        y = torch.randint(0, CLASSES, (STEPS, 4), generator=generator)
        return DataLoader([*zip(x, y, strict=True)], batch_size=None)


@pytest.fixture(scope="module", autouse=True)
def _transformers_imported() -> None:
    """Once, before the first test, which would otherwise look slow."""
    pytest.importorskip("transformers")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * a.is_slow) for name, a in ARCHITECTURES.items()]
)
def test_a_model_of_transformers_trains_as_it_does_plain(name: str) -> None:
    # Transformers 4 leaves forwards on modules whose outputs it has recorded: those of ours are removed at the end.
    assert_trains_as_plain(functools.partial(Pretrains, ARCHITECTURES[name]), but="the run left other modules" * IS_4)


@pytest.mark.parametrize("name", NETWORKS)
def test_a_model_in_the_manner_of_timm_trains_as_it_does_plain(name: str) -> None:
    assert_trains_as_plain(lambda: Classifies(NETWORKS[name]()))


def assert_trains_as_plain(make: Any, *, but: str = "") -> None:
    row = Row(make)
    expected = train(row)
    assert len(expected.losses) == STEPS
    assert all(map(math.isfinite, expected.losses))
    found = differences(train(row, plugins=[AccelPlugin(precision="32-true")]), expected)
    assert [one for one in found if not (but and one.startswith(but))] == []
