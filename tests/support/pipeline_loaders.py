"""Loaders, transforms and helpers of the tests of the device pipeline."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from lightning_accel.data.batch import Position
from lightning_accel.data.pipeline import DevicePipeline
from lightning_accel.data.pipeline_iteration import THREAD_NAME


def pipeline_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == THREAD_NAME]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    """For modules to import: fails a test that leaves a pipeline's thread."""
    yield
    if pipeline_threads():
        gc.collect()  # of a pipeline that nobody holds any more, but for a cycle
    assert pipeline_threads() == []


class Transform:
    """A batch transform made of a function, which notes the places it was called for."""

    def __init__(self, function: Callable[[Any], Any] = lambda batch: batch, *, on_host: bool = False) -> None:
        self.function = function
        self.on_host = on_host
        self.positions: list[Position] = []

    def __call__(self, batch: Any, position: Position) -> Any:
        self.positions.append(position)
        return self.function(batch)


def double(batch: Any) -> Any:
    return batch * 2


class Numbers(Dataset[Tensor]):
    """0, 1, 2 ... as tensors; ``broken`` is the one that raises, ``threads`` those that asked."""

    def __init__(self, length: int, broken: int | None = None) -> None:
        self.length = length
        self.broken = broken
        self.threads: set[threading.Thread] = set()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        self.threads.add(threading.current_thread())
        if index == self.broken:
            raise KeyError(f"sample {index} is broken")
        return torch.tensor(index)


class Stream(IterableDataset[Tensor]):
    """As :class:`Numbers`, without a length."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[Tensor]:
        return map(torch.tensor, range(self.length))


class Counting:
    """A loader with state, which gives out the very dict that it goes on changing."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.state = {"at": 0}

    def __iter__(self) -> Iterator[int]:
        while self.state["at"] < self.length:
            self.state["at"] += 1
            yield self.state["at"] - 1
        self.state["at"] = 0

    def state_dict(self) -> dict[str, int]:
        return self.state

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.state = dict(state)


def on_cpu(loader: Any, preprocess: Any = None, depth: int = 2, **options: Any) -> Any:
    return DevicePipeline(loader, "cpu", preprocess, depth, **options)


def values(batches: Any) -> list[Any]:
    return [batch.tolist() if isinstance(batch, Tensor) else batch for batch in batches]
