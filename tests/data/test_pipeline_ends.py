"""An iteration ends as a loader's does (at its end, early, by an error, with the process) and leaves nothing."""

from __future__ import annotations

import gc
import multiprocessing
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_accel.data import pipeline_iteration
from support.pipeline_loaders import (
    Numbers,
    Transform,
    double,
    no_thread_is_left,
    on_cpu,
    pipeline_threads,
    values,
)

__all__ = ["no_thread_is_left"]
LONG_S = 30.0  # never reached, unless a test fails


# -- errors --------------------------------------------------------------------------------------------------------


class Kept(DataLoader[Tensor]):
    """Keeps its iterator, as the garbage collector takes ten seconds to end workers after an error (torch 2.13)."""

    iterator: Any = None

    def __iter__(self) -> Any:
        self.iterator = super().__iter__()
        return self.iterator


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_error_of_the_dataset_comes_in_place_of_its_batch(num_workers: int) -> None:
    loader = Kept(Numbers(9, broken=3), num_workers=num_workers)
    batches = iter(on_cpu(loader))
    assert [next(batches).item() for _ in range(3)] == [0, 1, 2]
    with pytest.raises(KeyError, match="sample 3 is broken"):
        next(batches)
    assert pipeline_threads() == []
    assert list(batches) == []
    if num_workers:
        loader.iterator._shutdown_workers()


def test_an_error_of_a_transform_is_the_same_object_with_its_traceback() -> None:
    error = ZeroDivisionError("mine")

    def fail(batch: int) -> int:
        if batch == 1:
            raise error
        return batch

    batches = iter(on_cpu(range(5), Transform(fail)))
    assert next(batches) == 0
    with pytest.raises(ZeroDivisionError) as raised:
        next(batches)
    assert raised.value is error
    assert traceback.extract_tb(error.__traceback__)[-1].name == "fail"
    assert pipeline_threads() == []


def test_an_error_leaves_no_cycle_that_would_keep_batches() -> None:
    class Batch:
        pass

    def fail(batch: Batch) -> None:
        raise ValueError

    batch = Batch()
    kept = weakref.ref(batch)
    batches = iter(on_cpu([batch], Transform(fail)))
    gc.disable()
    try:
        with pytest.raises(ValueError) as raised:  # noqa: PT011  # any
            next(batches)
        del batch, batches, raised
        assert kept() is None
    finally:
        gc.enable()


def test_stop_iteration_of_a_transform_does_not_pass_for_the_end() -> None:
    with pytest.raises(RuntimeError, match="StopIteration"):
        list(on_cpu([1], Transform(lambda batch: next(iter([])))))


def test_an_interrupt_while_fetching_comes_at_once() -> None:
    def interrupted() -> Iterator[int]:
        yield 0
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        next(iter(on_cpu(interrupted())))


@pytest.mark.parametrize("depth", [-1, 1.5, "2", None, True])
def test_a_depth_that_is_none_is_refused(depth: Any) -> None:
    with pytest.raises(ValueError, match=rf"depth={depth!r}.*integer, 0 or more"):
        on_cpu([], depth=depth)


def test_what_is_not_iterable_is_refused() -> None:
    with pytest.raises(TypeError, match=r"iterable of batches.*not 3"):
        on_cpu(3)


# -- the end -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 2])
def test_breaking_off_leaves_no_thread(num_workers: int) -> None:
    for _ in on_cpu(DataLoader(Numbers(50), num_workers=num_workers)):
        assert len(pipeline_threads()) == 1
        break
    assert pipeline_threads() == []


def test_an_iteration_can_be_closed() -> None:
    batches = iter(on_cpu(range(9)))
    next(batches)
    batches.close()
    batches.close()
    assert pipeline_threads() == []
    assert list(batches) == []


def test_an_iteration_that_was_not_begun_has_no_thread() -> None:
    batches = iter(on_cpu(range(9)))
    assert pipeline_threads() == []
    batches.close()


def test_closing_the_pipeline_ends_every_iteration_and_what_is_left_is_the_loader() -> None:
    loader = DataLoader(Numbers(5))
    pipeline = on_cpu(loader, Transform(double))
    one, other = iter(pipeline), iter(pipeline)
    assert (next(one).item(), next(other).item(), next(one).item()) == (0, 0, 2)
    assert len(pipeline_threads()) == 2
    pipeline.close()
    assert pipeline_threads() == []
    assert list(one) == list(other) == []
    assert values(pipeline) == values(loader)
    assert type(iter(pipeline)) is type(iter(loader))


def test_closing_ends_the_loaders_iterator_too() -> None:
    ended = []

    def batches() -> Iterator[int]:
        try:
            yield from range(9)
        finally:
            ended.append(threading.current_thread())

    iteration = iter(on_cpu(batches()))
    next(iteration)
    iteration.close()
    assert ended == [threading.current_thread()]


def test_persistent_workers_serve_one_epoch_after_another() -> None:
    """They have one iterator for all epochs.

    The first epoch is broken off with the thread fetching from it: the second may have it begin anew only after that.
    What the first had fetched ahead is still its own.
    """
    pipeline = on_cpu(DataLoader(Numbers(40), num_workers=2, persistent_workers=True))
    first = iter(pipeline)
    next(first)
    assert values(pipeline) == [[index] for index in range(40)]
    assert [batch.tolist() for batch in first] == [[1], [2]]
    pipeline._iterator._shutdown_workers()


def test_closing_does_not_wait_for_a_worker_that_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker is in batch 1 until the test lets go of it; the thread, which waits for it, ends with it."""
    let_go = multiprocessing.get_context("fork").Event()

    class Stuck(Numbers):
        def __getitem__(self, index: int) -> Tensor:
            if index == 1:
                let_go.wait(LONG_S)
            return super().__getitem__(index)

    batches = iter(on_cpu(DataLoader(Stuck(9), num_workers=1, multiprocessing_context="fork")))
    next(batches)
    monkeypatch.setattr(pipeline_iteration, "PATIENCE_S", 0.05)
    batches.close()
    (thread,) = pipeline_threads()
    let_go.set()
    thread.join(LONG_S)
    assert not thread.is_alive()
    assert list(batches) == []


@pytest.mark.medium
def test_the_interpreter_ends_with_iterations_under_way() -> None:
    script = """
from torch.utils.data import DataLoader
from lightning_accel.data.pipeline import DevicePipeline
loaders = [DataLoader(range(99), num_workers=num_workers) for num_workers in (0, 1)]
under_way = [iter(DevicePipeline(loader, "cpu")) for loader in loaders]
print(*[next(batches).item() for batches in under_way])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0 0\n", "")
