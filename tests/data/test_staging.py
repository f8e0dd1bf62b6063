"""Batches of every structure arrive whole, and staging memory is given back when, and only when, its copy is over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

from lightning_accel.data.staging import Stager, move_plainly, tensors_within
from lightning_accel.memory.buffers import HostPool

pytestmark = pytest.mark.numbers

CPU = torch.device("cpu")
META = torch.device("meta")  # another device, which every machine has


class SimulatedMark:
    """Stands in for a CUDA event: the copies before it are over when the test says so."""

    def __init__(self) -> None:
        self.is_over = False
        self.was_waited_for = False

    def query(self) -> bool:
        return self.is_over

    def synchronize(self) -> None:
        self.was_waited_for = True


class Staging:
    """A stager whose device is simulated: host memory that is not pinned, and marks in place of events."""

    def __init__(self) -> None:
        self.marks: list[SimulatedMark] = []
        self.pool = HostPool(pinned=False)
        self.stager = Stager(CPU, pool=self.pool, mark=self._mark)

    def _mark(self) -> SimulatedMark:
        self.marks.append(SimulatedMark())
        return self.marks[-1]

    def move(self, batch: Any) -> Any:
        return self.stager.move(batch)[0]


@pytest.fixture
def staging() -> Iterator[Staging]:
    made = Staging()
    yield made
    made.stager.close()


class Pair(NamedTuple):
    image: Tensor
    label: Tensor


@dataclass
class Sample:
    image: Tensor
    name: str


@dataclass(frozen=True)
class Frozen:
    image: Tensor


class Graph:
    """As PyTorch Geometric's Data: no container, moves itself in place, and returns itself or nothing."""

    def __init__(self, x: Tensor, *, returns: bool = True) -> None:
        self.x = x
        self.returns = returns

    def to(self, device: torch.device) -> Any:
        self.x = self.x.to(device)
        return self if self.returns else None


def test_a_copy_is_new_memory_with_the_same_values(staging: Staging) -> None:
    source = torch.randn(3, 5)
    moved = staging.move(source)
    assert torch.equal(moved, source)
    assert moved.data_ptr() != source.data_ptr()


def test_the_structure_of_a_batch_stays(staging: Staging) -> None:
    batch = {
        "nested": [(torch.ones(2), None), {"deep": torch.zeros(1)}],
        "pair": Pair(torch.ones(3), torch.tensor(1)),
        "sample": Sample(torch.ones(4), "a"),
        "text": ["b", 3],
    }
    moved, arrived = staging.stager.move(batch)
    assert isinstance(moved["pair"], Pair)
    assert isinstance(moved["sample"], Sample)
    assert moved["text"] == ["b", 3]
    assert moved["nested"][0][1] is None
    assert len(arrived) == len(tensors_within(moved)) == 5
    assert all(map(torch.equal, tensors_within(moved), tensors_within(batch)))


def test_a_frozen_dataclass_passes_unchanged(staging: Staging) -> None:
    image = torch.ones(2)
    assert staging.move(Frozen(image)).image is image


@pytest.mark.parametrize(
    "source",
    [
        torch.empty(0, 3),
        torch.tensor(7),
        torch.arange(24).view(2, 3, 4).transpose(0, 2),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.arange(12.0)[::3],
        torch.ones(1, 3).expand(4, 3),
        torch.tensor([True, False]),
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.randn(5).to(torch.bfloat16),
    ],
    ids=["empty", "0-d", "transposed", "channels_last", "strided", "expanded", "bool", "conjugate", "bfloat16"],
)
def test_any_layout_arrives_as_to_would_have_it(staging: Staging, source: Tensor) -> None:
    moved, like = staging.move(source), torch.empty_like(source)
    assert torch.equal(moved, source)
    assert (moved.dtype, moved.shape, moved.stride()) == (source.dtype, source.shape, like.stride())


def test_a_tensor_that_needs_a_gradient_still_does(staging: Staging) -> None:
    with torch.no_grad():  # as on the background thread
        moved = staging.move(torch.ones(2, requires_grad=True))
    assert moved.requires_grad
    assert moved.is_leaf


def test_a_sparse_tensor_goes_by_its_own_method() -> None:
    moved, arrived = Stager(META, pool=HostPool(pinned=False), mark=SimulatedMark).move(torch.eye(3).to_sparse())
    assert moved.is_sparse
    assert [part.dim() for part in arrived] == [2, 1]  # indices and values


def test_the_memory_of_a_sparse_tensor_that_is_not_coalesced_is_found() -> None:
    """Its methods do not show it, and the consumer's stream has to be told of it."""
    indices, values = torch.tensor([[1, 1]]), torch.tensor([2.0, 3.0])
    twice = torch.sparse_coo_tensor(indices, values, (3,), check_invariants=True)
    assert [part.tolist() for part in tensors_within(twice)] == [[[1, 1]], [2.0, 3.0]]
    assert tensors_within(twice)[1].data_ptr() == values.data_ptr()
    assert [part.tolist() for part in tensors_within(nn.Parameter(twice))] == [[[1, 1]], [2.0, 3.0]]
    assert [part.tolist() for part in tensors_within(twice.coalesce())] == [[[1]], [5.0]]


def _nested() -> Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


def _quantised() -> Tensor:
    return torch.quantize_per_tensor(torch.ones(5), 0.1, 0, torch.qint8)


@pytest.mark.filterwarnings(
    "ignore:.*nested tensors is in prototype:UserWarning", "ignore:torch.quantize_per_tensor:UserWarning"
)
@pytest.mark.parametrize("make", [_nested, _quantised])
def test_the_memory_of_a_tensor_that_no_stream_can_be_told_of_is_a_plain_one(make: Callable[[], Tensor]) -> None:
    """A GPU's allocator takes neither nested nor quantised tensors."""
    tensor = make()
    (part,) = tensors_within(tensor)
    assert (type(part), part.layout, part.is_nested, part.is_quantized) == (Tensor, torch.strided, False, False)
    assert part.data_ptr() == tensor.untyped_storage().data_ptr()
    assert part.nbytes == tensor.untyped_storage().nbytes()


@pytest.mark.parametrize("returns", [True, False])
def test_an_object_with_a_method_to_goes_by_it(returns: bool) -> None:
    graph = Graph(torch.ones(2), returns=returns)
    moved, arrived = Stager(META, pool=HostPool(pinned=False), mark=SimulatedMark).move([graph])
    assert moved == [graph]
    assert graph.x.is_meta
    assert arrived == [graph.x]


def test_a_packed_sequence_keeps_its_lengths_on_the_host() -> None:
    """It is a tuple, too, but torch wants ``batch_sizes`` on the CPU: its own ``to`` knows."""
    packed = pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
    moved = move_plainly({"x": packed}, META, non_blocking=True)["x"]
    assert moved.data.is_meta
    assert moved.batch_sizes.device == CPU


def test_tokenized_text_stays_what_it_is(staging: Staging) -> None:
    transformers = pytest.importorskip("transformers")
    moved = staging.move(transformers.BatchEncoding({"input_ids": torch.ones(2, 3)}))
    assert isinstance(moved, transformers.BatchEncoding)


def test_a_field_named_to_is_no_method(staging: Staging) -> None:
    @dataclass
    class Edge:
        to: Tensor

    moved = staging.move(Edge(torch.ones(2)))
    assert torch.equal(moved.to, torch.ones(2))


def test_a_region_is_held_until_its_copy_is_over(staging: Staging) -> None:
    """The second batch takes a region of its own, the third the first one's.

    For the copy of the first is under way while the second is staged (its simulated mark is not reached), and over when
    the third is.
    """
    staging.move(torch.ones(1000))
    one = staging.pool.live_bytes
    staging.move(torch.ones(1000))
    assert staging.pool.live_bytes == 2 * one
    total = staging.pool.total_bytes
    staging.marks[0].is_over = True
    staging.move(torch.ones(1000))
    assert staging.pool.live_bytes == 2 * one
    assert staging.pool.total_bytes == total


def test_regions_come_back_in_order_only(staging: Staging) -> None:
    """Copies of one stream end in order: a later mark is not asked before an earlier one."""
    staging.move(torch.ones(1000))
    staging.move(torch.ones(1000))
    live = staging.pool.live_bytes
    staging.marks[1].is_over = True
    staging.stager.settle()
    assert staging.pool.live_bytes == live
    staging.marks[0].is_over = True
    staging.stager.settle()
    assert staging.pool.live_bytes == 0


def test_what_was_begun_before_an_error_holds_its_region(staging: Staging) -> None:
    class Broken:
        def to(self, device: torch.device) -> None:
            raise ConnectionError("gone")

    with pytest.raises(ConnectionError, match=r"^gone$"):
        staging.move([torch.ones(1000), Broken()])
    assert staging.pool.live_bytes > 0
    staging.marks[0].is_over = True
    staging.stager.settle()
    assert staging.pool.live_bytes == 0


def test_closing_waits_for_what_is_under_way(staging: Staging) -> None:
    staging.move(torch.ones(1000))
    staging.stager.close()
    assert staging.marks[0].was_waited_for
    assert staging.pool.total_bytes == 0


def test_without_pinned_memory_batches_still_move() -> None:
    """A simulated machine that has none to give: said once, then copied from where it lies."""
    pool = HostPool(pinned=True)
    pool._failure = "out of memory"
    stager = Stager(CPU, pool=pool, mark=SimulatedMark)
    with pytest.warns(RuntimeWarning, match=r"not pinned.*out of memory.*ulimit -l") as warned:
        moved, _ = stager.move([torch.ones(3), torch.zeros(2)])
    assert len(warned) == 1
    assert torch.equal(moved[0], torch.ones(3))
    stager.close()
