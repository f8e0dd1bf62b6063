"""A batch in parts: what belongs to a sample goes with it, and what cannot be told apart is said."""

from __future__ import annotations

from collections import OrderedDict, UserDict, deque
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from lightning_accel.core.samples import count_samples, split_samples
from lightning_accel.core.tree import tensors_in

pytestmark = pytest.mark.numbers


class Pair(NamedTuple):
    image: Tensor
    label: Tensor


@dataclass
class Sample:
    image: Tensor
    scale: float
    name: str
    captions: list[str]


@dataclass(frozen=True)
class Frozen:
    image: Tensor


def rows(size: int = 5) -> Tensor:
    return torch.arange(size * 2.0).reshape(size, 2)


BATCHES: dict[str, Any] = {
    "a tensor": rows(),
    "a tuple": (rows(), torch.arange(5)),
    "a list, as torch collates a tuple": [rows(), torch.arange(5)],
    "a dict": {"x": rows(), "y": torch.arange(5), "temperature": torch.tensor(0.5), "name": "train", "n": 5},
    "an ordered dict": OrderedDict(x=rows()),
    "a mapping that is no dict": UserDict(x=rows()),
    "a namedtuple": Pair(rows(), torch.arange(5)),
    "a dataclass": Sample(rows(), 0.5, "train", ["a", "b", "c", "d", "e"]),
    "nested": {"views": (rows(), rows()), "pair": Pair(rows(), torch.arange(5)), "none": None},
}


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_the_parts_are_the_whole(batch: Any) -> None:
    parts = split_samples(batch, 3)
    assert [size for _, size in parts] == [3, 2]
    assert {type(part) for part, _ in parts} == {type(batch)}
    together = zip(*(tensors_in(part) for part, _ in parts), strict=True)
    for whole, (first, second) in zip(tensors_in(batch), together, strict=True):
        assert torch.equal(torch.cat([first, second]) if whole.dim() else first, whole)


def test_lists_without_tensors_that_are_as_long_as_the_batch_go_with_it() -> None:
    batch = {"x": rows(), "captions": ["a", "b", "c", "d", "e"], "classes": ("cat", "dog"), "name": "train"}
    first, second = (part for part, _ in split_samples(batch, 3))
    assert (first["captions"], second["captions"]) == (["a", "b", "c"], ["d", "e"])
    assert (second["classes"], second["name"]) == (("cat", "dog"), "train")


def test_parts_are_views_so_that_no_memory_is_asked_for() -> None:
    batch = rows()
    assert all(part.untyped_storage() is batch.untyped_storage() for part, _ in split_samples(batch, 2))


@pytest.mark.parametrize(("most", "sizes"), [(5, [5]), (9, [5]), (4, [3, 2]), (2, [2, 2, 1]), (1, [1] * 5)])
def test_parts_are_nearly_alike_in_size(most: int, sizes: list[int]) -> None:
    assert [size for _, size in split_samples(rows(), most)] == sizes


def test_a_pair_of_tensors_of_two_samples_is_split_by_samples() -> None:
    (x, y), _ = split_samples([rows(2), torch.arange(2)], 1)[1]
    assert (x.tolist(), y.tolist()) == ([[2.0, 3.0]], [1])


REFUSED: dict[str, tuple[Any, str]] = {
    "numbers only": ({"n": 3}, "no tensor in it has a dimension of samples"),
    "scalars only": (torch.tensor(1.0), "no tensor in it has a dimension of samples"),
    "lengths that differ": ((rows(), torch.ones(3)), "the first dimensions of its tensors differ: 3, 5"),
    "an iterator": (iter([rows()]), "of the list_iterator in it no part can be taken"),
    "an array": ({"x": rows(), "a": np.ones(5)}, "of the ndarray in it no part can be taken"),
    "sequences, packed": (pack_sequence([torch.ones(2, 2)]), "of the PackedSequence in it"),
    "sequences, nested": (torch.nested.nested_tensor([rows()], layout=torch.jagged), "nested or sparse tensor"),
    "a sparse tensor": (rows().to_sparse(), "nested or sparse tensor"),
    "a frozen dataclass": (Frozen(rows()), "as a frozen dataclass cannot"),
    "tensors in a list as long as the batch": (
        {"x": rows(), "boxes": [torch.ones(5)] * 5},
        "a list of 5 tensors may have one for each sample",
    ),
}


@pytest.mark.parametrize(("batch", "why"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_split_is_refused_with_the_reason(batch: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        split_samples(batch, 1)


def test_samples_are_counted_in_every_container() -> None:
    assert [count_samples(batch) for batch in (*BATCHES.values(), deque([rows(3)]))] == [5] * len(BATCHES) + [3]


def test_a_tokenizers_batch_is_split() -> None:
    transformers = pytest.importorskip("transformers")
    batch = transformers.BatchEncoding({"input_ids": torch.arange(6).reshape(3, 2), "labels": torch.arange(3)})
    first, second = (part for part, _ in split_samples(batch, 2))
    assert type(first) is transformers.BatchEncoding
    assert (first["labels"].tolist(), second["labels"].tolist()) == ([0, 1], [2])
