"""The pipeline on a GPU: right values whatever the consumer's stream is busy with, and nothing that waits for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_accel.data.pipeline import DevicePipeline
from lightning_accel.data.staging import Stager
from lightning_accel.memory.buffers import HostPool
from support.pipeline_loaders import Transform, double, no_thread_is_left

__all__ = ["no_thread_is_left"]
pytestmark = pytest.mark.gpu

LONG_CYCLES = 1_000_000_000  # about half a second


@pytest.fixture
def no_synchronisation() -> Iterator[None]:
    """Has torch raise where it would make the host wait for the device."""
    torch.cuda.init()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode(before)


def filled(count: int, size: int = 1 << 20) -> list[Tensor]:
    return [torch.full((size,), float(index)) for index in range(count)]


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def busy() -> torch.cuda.Event:
    """Gives the current stream long work; the event comes after it."""
    torch.cuda._sleep(LONG_CYCLES)
    over = torch.cuda.Event()
    over.record()
    return over


def test_batches_of_any_structure_arrive(no_synchronisation: None) -> None:
    batch = {
        "image": torch.randn(4, 3, 8, 8).to(memory_format=torch.channels_last),
        "rest": [torch.tensor(3), torch.empty(0, 2), torch.arange(10)[::3], None, "text"],
        "pinned": torch.randn(5).pin_memory(),
    }
    batches = list(DevicePipeline([batch, batch], "cuda", depth=1))
    torch.cuda.set_sync_debug_mode("default")
    for moved in batches:
        assert moved["image"].is_contiguous(memory_format=torch.channels_last)
        assert moved["rest"][3:] == [None, "text"]
        for one, other in [
            (moved["image"], batch["image"]),
            (moved["pinned"], batch["pinned"]),
            *zip(moved["rest"][:3], batch["rest"][:3], strict=True),
        ]:
            assert one.is_cuda
            assert torch.equal(one.cpu(), other)


def test_the_next_batch_is_made_ready_while_the_consumers_stream_is_busy(no_synchronisation: None) -> None:
    """The consumer's stream has half a second to go.

    In that time batch 1 is copied and preprocessed to the end, and handed out without waiting.
    """
    made: list[Tensor] = []
    batches = iter(DevicePipeline(filled(4), "cuda", Transform(lambda batch: made.append(batch * 2) or made[-1])))
    next(batches)
    over = busy()
    wait_for(lambda: len(made) > 1)
    next(batches)
    side_is_done = torch.cuda.Event()
    with torch.cuda.stream(batches._run.lane._side):  # type: ignore[attr-defined]
        side_is_done.record()
    wait_for(side_is_done.query)
    assert not over.query()
    batches.close()  # type: ignore[attr-defined]
    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()


@pytest.mark.parametrize("depth", [1, 3])
def test_a_batch_dropped_while_it_is_in_use_keeps_its_memory(depth: int, no_synchronisation: None) -> None:
    """Every batch is copied by the consumer's stream only after long work, and dropped at once.

    The side stream is far ahead: were the memory given to it for a later batch, the copy would have that one's values.
    """
    copies = []
    for batch in DevicePipeline(filled(12), "cuda", Transform(double), depth):
        torch.cuda._sleep(LONG_CYCLES // 10)
        copies.append(batch.clone())
        del batch
    torch.cuda.set_sync_debug_mode("default")
    assert [(copy.min().item(), copy.max().item()) for copy in copies] == [(2.0 * i, 2.0 * i) for i in range(12)]


@pytest.mark.needs_kernels("DLPack shows others a device's memory")
def test_a_view_through_dlpack_keeps_the_memory_that_was_copied_for_it() -> None:
    """What preprocessing hands on may be memory whose owner torch does not know, as CuPy's arrays are."""
    through = Transform(lambda batch: torch.from_dlpack(batch.__dlpack__(stream=-1)))
    copies = []
    for batch in DevicePipeline(filled(12), "cuda", through):
        torch.cuda._sleep(LONG_CYCLES // 10)
        copies.append(batch.clone())
        del batch
    assert [copy.max().item() for copy in copies] == list(range(12))


def test_what_a_loader_computes_on_the_gpu_is_waited_for() -> None:
    def computed() -> Iterator[Tensor]:
        for index in range(4):
            batch = torch.zeros(1 << 20, device="cuda")
            torch.cuda._sleep(LONG_CYCLES // 10)
            yield batch.add_(index)

    made = [batch.max().item() for batch in DevicePipeline(computed(), "cuda", Transform(double))]
    assert made == [0, 2, 4, 6]


@pytest.mark.parametrize("pin_memory", [False, True])
def test_batches_of_workers_arrive(pin_memory: bool) -> None:
    loader = DataLoader(TensorDataset(torch.arange(50)), batch_size=8, num_workers=2, pin_memory=pin_memory)
    batches = [batch.tolist() for (batch,) in DevicePipeline(loader, "cuda")]
    assert batches == [batch.tolist() for (batch,) in loader]


def test_a_batch_is_used_on_the_stream_that_is_current() -> None:
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):
        made = [batch.sum() for batch in DevicePipeline(filled(4), "cuda", Transform(double))]
    other.synchronize()
    assert [value.item() for value in made] == [2.0 * index * (1 << 20) for index in range(4)]


def test_all_regions_come_back() -> None:
    pool = HostPool(pinned=True)
    stager = Stager(torch.device("cuda", torch.cuda.current_device()), pool=pool)
    for batch in filled(20):
        stager.move(batch)
    torch.cuda.synchronize()
    stager.settle()
    assert pool.live_bytes == 0
    stager.close()


@pytest.mark.parametrize("end", ["exhausted", "closed", "failed"])
def test_no_pinned_memory_is_held_after_an_iteration(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pools: list[Any] = []

    class Noted(HostPool):
        def __init__(self, *, pinned: bool) -> None:
            super().__init__(pinned=pinned)
            pools.append(self)

    monkeypatch.setattr("lightning_accel.data.staging.HostPool", Noted)

    def fail(batch: Tensor) -> Tensor:
        raise ValueError(end)

    batches: Any = iter(DevicePipeline(filled(4), "cuda", Transform(fail) if end == "failed" else None))
    if end == "exhausted":
        list(batches)
    elif end == "closed":
        next(batches)
        batches.close()
    else:
        with pytest.raises(ValueError, match="failed"):
            next(batches)
    assert [pool.total_bytes for pool in pools] == [0]
