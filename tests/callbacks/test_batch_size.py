"""The number of samples, found in batches of every build."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from lightning_accel.callbacks._batch_size import SampleCounter, size_reader

X = torch.zeros(6, 3, 4)


def counter_of(say: Any = print, batch_size_fn: Any = None) -> SampleCounter:
    return SampleCounter(batch_size_fn, say, "GpuStats", "energy_j_per_sample")


Pair = namedtuple("Pair", ["x", "y"])


@dataclass
class Record:
    name: str
    x: Tensor


class Graphs:
    """Like a PyG batch: its tensors have a row per node, and it knows how many graphs there are."""

    batch_size = 6
    x = torch.zeros(50, 4)


BATCHES: dict[str, Any] = {
    "tensor": X,
    "tuple": (X, torch.zeros(6)),
    "dict": {"step": 3, "scale": torch.tensor(1.0), "x": X},
    "nested": {"inputs": [{"ids": X}, None]},
    "dataclass": Record("a", X),
    "namedtuple": Pair(X, torch.zeros(6)),
    "two views": [[X, X], torch.zeros(6)],
    "numpy": {"x": X.numpy()},
    "jagged": torch.nested.nested_tensor([torch.zeros(n, 2) for n in range(1, 7)], layout=torch.jagged),
    "packed": pack_sequence([torch.zeros(n, 2) for n in range(6, 0, -1)]),
    "detection": ([torch.zeros(3, 8, 8)] * 6, [{"boxes": torch.zeros(2, 4)}] * 6),
    "graphs": Graphs(),
    "strings": ["text"] * 6,
    "columns of strings": {"epoch": 1, "text": ["text"] * 6},
    "tuples of strings": [("text",) * 6, ("text",) * 6],
    "scalars": [torch.tensor(0.0)] * 6,
}


@pytest.mark.parametrize("name", BATCHES)
def test_samples_are_found_in(name: str) -> None:
    reader = size_reader(BATCHES[name])
    assert reader is not None
    assert reader(BATCHES[name]) == 6


@pytest.mark.parametrize("batch", [7, "text", Ellipsis, {}, [], {"n": 3}, torch.tensor(1.0)], ids=repr)
def test_no_samples_are_made_up_for(batch: Any) -> None:
    assert size_reader(batch) is None


def test_the_search_happens_once() -> None:
    counter = counter_of()
    assert [counter.count({"x": torch.zeros(n, 2)}) for n in (4, 4, 1)] == [4, 4, 1]
    reader = counter._read
    counter.count({"x": torch.zeros(5, 2)})
    assert counter._read is reader


def test_a_batch_of_another_build_is_searched_again() -> None:
    counter = counter_of()
    batches = [{"x": torch.zeros(4)}, {"y": torch.zeros(3)}, (torch.zeros(2),), None, torch.zeros(5)]
    assert [counter.count(batch) for batch in batches] == [4, 3, 2, 0, 5]


def test_an_unknown_batch_is_reported_once() -> None:
    said: list[str] = []
    counter = counter_of(said.append)
    assert [counter.count(batch) for batch in (1, 2, "text")] == [None] * 3
    assert said == [
        "GpuStats: a batch of type int does not tell how many samples it holds, so energy_j_per_sample is left out."
        " Give GpuStats(batch_size_fn=...) to have it."
    ]


def test_a_batch_whose_attributes_raise_is_unknown() -> None:
    class Hostile:
        @property
        def batch_size(self) -> int:
            raise RuntimeError("not collated yet")

    assert counter_of().count(Hostile()) is None


def test_the_users_function_decides() -> None:
    counter = counter_of(batch_size_fn=lambda batch: batch["tokens"])
    assert counter.count({"tokens": 512, "x": X}) == 512
