"""Batches are made ready ahead, in order, and come out as they would without a pipeline."""

from __future__ import annotations

import multiprocessing
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from lightning_accel.data.batch import Position
from lightning_accel.data.pipeline import DevicePipeline
from lightning_accel.data.pipeline_iteration import THREAD_NAME
from support.pipeline_loaders import (
    Numbers,
    Stream,
    Transform,
    double,
    no_thread_is_left,
    on_cpu,
    values,
)

pytestmark = pytest.mark.numbers

__all__ = ["no_thread_is_left"]
LONG_S = 30.0  # never reached, unless a test fails


# -- what comes out ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("dataset", [Numbers(7), Stream(7)], ids=["map", "iterable"])
def test_all_batches_come_in_order_and_preprocessed(dataset: Any, num_workers: int) -> None:
    loader = DataLoader(
        dataset, batch_size=3, num_workers=num_workers, multiprocessing_context="fork" if num_workers else None
    )
    expected = values(batch * 2 for batch in loader)
    pipeline = on_cpu(loader, Transform(double))
    assert values(pipeline) == expected
    assert values(pipeline) == expected  # and in the next epoch


@pytest.mark.parametrize("depth", [1, 2, 50])
def test_any_iterable_is_a_loader(depth: int) -> None:
    batches = [torch.ones(2, 3), {"x": torch.ones(5)}, None, "text", [torch.tensor(1)]]
    assert all(map(lambda one, other: one is other, on_cpu(batches, depth=depth), batches))


def test_an_empty_loader_ends_at_once() -> None:
    assert list(on_cpu([])) == []


def test_on_a_cpu_nothing_is_copied() -> None:
    batches = [torch.ones(3), torch.ones(2)]
    assert [batch.data_ptr() for batch in on_cpu(batches)] == [batch.data_ptr() for batch in batches]


def test_on_another_device_batches_are_moved_by_to() -> None:
    """The meta device stands for those without streams that are known here (mps, xla)."""
    seen = []
    on_host, on_device = (
        Transform(lambda batch: seen.append(batch[0].device.type) or batch, on_host=on_host)
        for on_host in (True, False)
    )
    for transform in (on_host, on_device):
        assert [batch[0].is_meta for batch in DevicePipeline([(torch.ones(2), 1)], "meta", transform)] == [True]
    assert seen == ["cpu", "meta"]


def test_preprocessing_tracks_no_gradients() -> None:
    weight = torch.ones(2, requires_grad=True)
    assert [batch.requires_grad for batch in on_cpu([torch.ones(2)], Transform(lambda batch: batch * weight))] == [
        False
    ]


@pytest.mark.parametrize("mode", ["max_size_cycle", "sequential", "min_size", "max_size"])
def test_lightning_combines_pipelines_as_it_combines_loaders(mode: Any) -> None:
    loaders = [DataLoader(Numbers(7), batch_size=3), DataLoader(Stream(4), batch_size=2)]
    expected = [repr(item) for item in CombinedLoader(loaders, mode)]
    assert [repr(item) for item in CombinedLoader([on_cpu(loader) for loader in loaders], mode)] == expected


def test_a_combined_loader_is_a_loader() -> None:
    combined = CombinedLoader([DataLoader(Numbers(4)), DataLoader(Numbers(4))], "min_size")
    assert [index for _, index, _ in on_cpu(combined)] == [0, 1, 2, 3]


# -- where and when ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_next_batches_are_prepared_while_the_consumer_holds_one(num_workers: int) -> None:
    """The consumer holds the first batch, and asks for nothing until the next two have been preprocessed.

    Without a pipeline they never would be. A fourth is not begun: after a while there are still three.
    """
    third = threading.Event()
    transform = Transform(lambda batch: third.set() if batch.item() == 2 else None)
    batches = iter(on_cpu(DataLoader(Numbers(10), num_workers=num_workers), transform, depth=2))
    next(batches)
    assert third.wait(LONG_S)
    time.sleep(0.05)
    assert len(transform.positions) == 3


def test_preprocessing_runs_on_a_thread_of_its_own() -> None:
    threads = set()
    for _ in on_cpu([1, 2], Transform(lambda batch: threads.add(threading.current_thread()))):
        pass
    assert [thread.name for thread in threads] == [THREAD_NAME]


def test_without_workers_the_dataset_is_asked_on_the_consumers_thread() -> None:
    """As a sqlite connection wants it, which may be used on the thread that opened it only."""
    dataset = Numbers(5)
    list(on_cpu(DataLoader(dataset)))
    assert dataset.threads == {threading.current_thread()}


class ThreadsOfSampler(Sampler[int]):
    """In order, one at a time, noting the threads that ask."""

    seen: ClassVar[set[str]] = set()

    def __iter__(self) -> Iterator[int]:
        for index in range(20):
            self.seen.add(threading.current_thread().name)
            yield index


def test_a_sampler_of_the_users_is_asked_on_the_consumers_thread() -> None:
    """With workers the sampler still runs in this process, at every fetch, and may draw from global generators."""
    list(on_cpu(DataLoader(range(20), sampler=ThreadsOfSampler(), num_workers=1)))
    assert ThreadsOfSampler.seen == {threading.current_thread().name}


def test_with_workers_a_late_batch_does_not_hold_up_an_earlier_one() -> None:
    """The worker is stuck in batch 1 until the test lets go of it.

    Batch 0 is handed out nevertheless, though the pipeline is to have two more under way.
    """
    let_go = multiprocessing.get_context("fork").Event()

    class Stuck(Numbers):
        def __getitem__(self, index: int) -> Tensor:
            if index == 1:
                let_go.wait(LONG_S)
            return super().__getitem__(index)

    batches = iter(on_cpu(DataLoader(Stuck(3), num_workers=1, multiprocessing_context="fork")))
    start = time.monotonic()
    assert next(batches).item() == 0
    assert time.monotonic() - start < LONG_S / 2
    let_go.set()
    assert values(batches) == [[1], [2]]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_shuffling_is_that_of_the_global_seed(num_workers: int) -> None:
    def shuffled(wrap: Callable[[Any], Any]) -> tuple[list[Any], float]:
        torch.manual_seed(3)
        loader = wrap(DataLoader(Numbers(20), batch_size=3, shuffle=True, num_workers=num_workers))
        return values(loader) + values(loader), torch.rand(()).item()

    assert shuffled(on_cpu) == shuffled(lambda loader: loader)


def test_random_augmentation_in_the_dataset_is_that_of_the_global_seed() -> None:
    class Noisy(Numbers):
        def __getitem__(self, index: int) -> Tensor:
            return torch.tensor([index + random.random(), torch.rand(()).item()])

    def drawn(wrap: Callable[[Any], Any]) -> list[Any]:
        random.seed(1)
        torch.manual_seed(1)
        return values(wrap(DataLoader(Noisy(9), batch_size=2)))

    assert drawn(on_cpu) == drawn(lambda loader: loader)


def test_the_loader_is_asked_for_its_iterator_at_the_beginning() -> None:
    torch.manual_seed(0)
    iter(DataLoader(Numbers(2), shuffle=True))
    expected = torch.get_rng_state()
    torch.manual_seed(0)
    iter(on_cpu(DataLoader(Numbers(2), shuffle=True)))
    assert torch.equal(torch.get_rng_state(), expected)


def test_batches_are_prepared_for_their_own_place() -> None:
    asked = []

    def position() -> Position:
        asked.append(1)
        return Position(training=False, epoch=4, batch_idx=10, loader_idx=1)

    transform = Transform()
    list(on_cpu(range(3), transform, position=position))
    assert asked == [1]
    assert transform.positions == [
        Position(training=False, epoch=4, batch_idx=index, loader_idx=1) for index in (10, 11, 12)
    ]


def test_epochs_are_counted_where_nobody_tells_them() -> None:
    transform = Transform()
    pipeline = on_cpu([0], transform)
    list(pipeline), list(pipeline)
    assert transform.positions == [Position(epoch=0), Position(epoch=1)]


# -- memory --------------------------------------------------------------------------------------------------------


def test_a_batch_is_freed_when_the_consumer_drops_it() -> None:
    """The thread waits for its next job, and must not hold the last batch meanwhile."""
    made = []
    batches = iter(on_cpu([1, 2, 3], Transform(lambda batch: made.append(weakref.ref(t := torch.ones(2))) or t)))
    for index in range(3):
        batch = next(batches)
        assert made[index]() is batch
        del batch
        assert made[index]() is None
