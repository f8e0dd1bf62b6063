"""The table of trainings: each written as another stranger would, and run plain and accelerated by the harness."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset


@dataclass
class Made:
    """What a Trainer fits.

    Attributes:
        module: The user's.
        train: Their loader, loaders or datamodule.
        val: To validate on, if anything.
        options: Of their Trainer.
        elsewhere: What keeps tensors from one step to the next, and is not the module's.
    """

    module: LightningModule
    train: Any
    val: Any = None
    options: dict[str, Any] = field(default_factory=dict)
    elsewhere: Any = None


@dataclass(frozen=True)
class Training:
    """One of the table.

    Attributes:
        name: Of the function that makes it.
        make: Makes everything anew, the same each time.
        epochs: Of its run.
        weights_choose: Whether what the weights compute decides what is drawn next, batches or random numbers.
        resumes: Whether a checkpoint of it can be gone on from.
        deterministic: Whether it runs under ``Trainer(deterministic=True)``.
        bf16: Whether it runs under ``Trainer(precision="bf16-mixed")``.
    """

    name: str
    make: Callable[[], Made]
    epochs: int = 2
    weights_choose: bool = False
    resumes: bool = True
    deterministic: bool = True
    bf16: bool = True


TRAININGS: dict[str, Training] = {}


def training(make: Any = None, **traits: Any) -> Any:
    """Adds what ``make`` makes to the table, under its name."""

    def add(make: Callable[[], Made]) -> Callable[[], Made]:
        name = make.__name__
        assert name not in TRAININGS, name
        TRAININGS[name] = Training(name, make, **traits)
        return make

    return add if make is None else add(make)


def read_all() -> dict[str, Training]:
    """The whole table."""
    from strangers import trainings

    for found in pkgutil.iter_modules(trainings.__path__):
        importlib.import_module(f"{trainings.__name__}.{found.name}")
    return TRAININGS


# -- data, drawn from streams of its own ------------------------------------------------------------------------------


def drawn(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers that leave the run's own stream alone."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def drawn_ints(high: int, *shape: int, seed: int = 1) -> Tensor:
    """Whole numbers below ``high``, as :func:`drawn`."""
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def images(count: int = 24, channels: int = 3, size: int = 8, classes: int = 4) -> Dataset[Any]:
    return TensorDataset(drawn(count, channels, size, size), drawn_ints(classes, count))


def vectors(count: int = 24, dim: int = 8, classes: int = 4) -> Dataset[Any]:
    return TensorDataset(drawn(count, dim), drawn_ints(classes, count))


def loader(dataset: Any, batch_size: int = 4, *, shuffle: bool = True, **options: Any) -> DataLoader[Any]:
    return DataLoader(dataset, batch_size=batch_size, shuffle=shuffle, **options)


def made(module: LightningModule, train: Any, val: Any = None, /, elsewhere: Any = None, **options: Any) -> Made:
    return Made(module, train, val, options, elsewhere)


class Items(Dataset[Any]):
    """A list as a dataset."""

    def __init__(self, items: Sequence[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]
