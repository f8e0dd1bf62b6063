"""Tensors are found wherever they sit in a batch, and everything else is left alone."""

from __future__ import annotations

import collections
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from lightning_accel.core.tree import leaves, map_tensors, tensors_in

pytestmark = pytest.mark.numbers


class Pair(NamedTuple):
    image: Tensor
    name: str


@dataclass
class Sample:
    image: Tensor
    label: int
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Frozen:
    image: Tensor


class Opaque:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def t(value: float) -> Tensor:
    return torch.tensor(value)


BATCHES: dict[str, tuple[Any, int]] = {
    "a tensor": (t(1), 1),
    "a tuple": ((t(1), t(2)), 2),
    "a list": ([t(1), "text", None], 1),
    "a dict": ({"x": t(1), "n": 3}, 1),
    "an ordered dict": (collections.OrderedDict(x=t(1)), 1),
    "a default dict": (collections.defaultdict(list, x=t(1)), 1),
    "a deque": (collections.deque([t(1), "text"]), 1),
    "a list of a class of its own": (collections.UserList([t(1), t(2)]), 2),
    "a range, which may be long": ([range(10**12), t(1)], 1),
    "a namedtuple": (Pair(t(1), "cat"), 1),
    "a dataclass": (Sample(t(1), 3, {"mask": t(2)}), 2),
    "nested": ({"views": [(t(1), Pair(t(2), "cat")), Sample(t(3), 0)]}, 3),
    "no tensor at all": (["text", 3, None, b"bytes"], 0),
    "None": (None, 0),
    "an object of an unknown class": (Opaque(t(1)), 0),
}


@pytest.mark.parametrize(("batch", "count"), BATCHES.values(), ids=BATCHES)
def test_every_tensor_is_found(batch: Any, count: int) -> None:
    assert len(tensors_in(batch)) == count


@pytest.mark.parametrize(("batch", "count"), BATCHES.values(), ids=BATCHES)
def test_mapping_keeps_the_structure_and_changes_the_tensors(batch: Any, count: int) -> None:
    mapped = map_tensors(lambda tensor: tensor + 10, batch)
    assert type(mapped) is type(batch)
    assert [float(b) - float(a) for a, b in zip(tensors_in(batch), tensors_in(mapped), strict=True)] == [10.0] * count


@pytest.mark.parametrize(("batch", "count"), BATCHES.values(), ids=BATCHES)
def test_leaves_are_the_tensors_and_everything_else(batch: Any, count: int) -> None:
    assert sum(isinstance(leaf, Tensor) for leaf in leaves(batch)) == count
    assert not any(isinstance(leaf, list | tuple | dict) for leaf in leaves(batch))


def test_order_is_the_structures() -> None:
    assert [int(x) for x in tensors_in({"b": t(1), "a": (t(2), [t(3)])})] == [1, 2, 3]


def test_a_frozen_dataclass_stays_as_it_is() -> None:
    batch = Frozen(t(1))
    assert float(map_tensors(lambda tensor: tensor + 1, batch).image) == 1.0


def test_a_packed_sequence_is_still_one() -> None:
    packed = pack_sequence([torch.ones(3, 2), torch.ones(2, 2)])
    mapped = map_tensors(lambda tensor: tensor.clone(), packed)
    assert isinstance(mapped, PackedSequence)
    assert torch.equal(mapped.data, packed.data)


def test_the_users_own_containers_are_not_touched() -> None:
    inner = [t(1)]
    batch = {"x": inner}
    map_tensors(lambda tensor: tensor + 1, batch)
    assert float(inner[0]) == 1.0
