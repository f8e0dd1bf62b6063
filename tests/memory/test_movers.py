"""Copies run in order beside the computation, hold what they need, and let go of it on the thread that asked."""

from __future__ import annotations

import gc
import mmap
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from lightning_accel.memory.buffers import HostPool, Pool, Region, SpillFile
from lightning_accel.memory.movers import Mover, StreamMover, ThreadMover
from support.gpu_sizes import on_gpu

pytestmark = pytest.mark.numbers

CPU = torch.device("cpu")


@pytest.fixture
def pool() -> Iterator[Pool]:
    made = HostPool(pinned=False)
    yield made
    made.close()


@pytest.fixture
def mover() -> Iterator[Mover]:
    made = ThreadMover(CPU)
    yield made
    made.close()


def copying_threads() -> int:
    return sum(thread.name.startswith("lightning-accel-offload") for thread in threading.enumerate())


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def pattern(number: int, nbytes: int = 100_000) -> Tensor:
    return torch.full((nbytes,), number, dtype=torch.uint8)


def test_bytes_go_out_and_come_back(pool: Pool, mover: Mover) -> None:
    source = torch.randint(256, (100_001,), dtype=torch.uint8)
    region = pool.take(source.numel())
    mover.out(source, region, in_flight=2)
    assert torch.equal(mover.land(mover.back(region, source.numel(), CPU)), source)


def test_copies_end_in_the_order_in_which_they_start(pool: Pool, mover: Mover) -> None:
    """So a region may be handed out again while the copies of its former use are under way."""
    region = pool.take(100_000)
    flights = []
    for number in range(20):
        mover.out(pattern(number), region, in_flight=100)
        flights.append(mover.back(region, 100_000, CPU))
    assert all(torch.equal(mover.land(flight), pattern(number)) for number, flight in enumerate(flights))


def test_what_is_on_its_way_out_is_bounded(pool: Pool, mover: Mover) -> None:
    sources = [pattern(number) for number in range(10)]
    held = [weakref.ref(source) for source in sources]
    for _ in range(10):
        mover.out(sources.pop(0), pool.take(100_000), in_flight=2)
    assert sum(source() is not None for source in held) <= 2


def test_settling_lets_go_of_what_has_arrived(pool: Pool, mover: Mover) -> None:
    source = pattern(1)
    held = weakref.ref(source)
    mover.out(source, pool.take(100_000), in_flight=2)
    del source

    def is_gone() -> bool:
        mover.settle()
        return held() is None

    wait_for(is_gone)


def test_a_landing_lets_go_of_everything_before_it(pool: Pool, mover: Mover) -> None:
    source, region = pattern(1), pool.take(100_000)
    held = weakref.ref(source)
    mover.out(source, region, in_flight=2)
    del source
    never_landed = weakref.ref(mover.back(region, 100_000, CPU).bytes)
    mover.land(mover.back(region, 100_000, CPU))
    assert held() is None
    assert never_landed() is None


def test_memory_is_never_freed_on_the_thread_that_copies(pool: Pool, mover: Mover) -> None:
    """A profiler sees only the frees of the thread it runs on."""
    freed_on = []

    def note(_: object) -> None:
        freed_on.append(threading.current_thread())

    watched = []
    for number in range(50):
        source, region = pattern(number, 1000), pool.take(1000)
        watched.append(weakref.ref(source, note))
        mover.out(source, region, in_flight=2)
        del source
        arrived = mover.back(region, 1000, CPU)
        watched.append(weakref.ref(arrived.bytes, note))
        if number % 2:
            mover.land(arrived)
        del arrived
        mover.settle()
    mover.close()
    assert freed_on == [threading.main_thread()] * 100


def test_what_a_copy_raises_is_raised_where_it_is_waited_for(pool: Pool, mover: Mover) -> None:
    file = SpillFile()
    gone = mmap.mmap(-1, 4096)
    gone.close()
    good = mover.back(pool.take(20), 20, CPU)
    bad = mover.back(Region(file.take(20).bytes, file, gone), 20, CPU)
    mover.land(good)
    with pytest.raises(ValueError, match="mmap closed"):
        mover.land(bad)
    file.close()


def test_closing_ends_the_thread_after_its_copies(pool: Pool) -> None:
    mover = ThreadMover(CPU)
    regions = [pool.take(100_000) for _ in range(5)]
    for number, region in enumerate(regions):
        mover.out(pattern(number), region, in_flight=100)
    assert copying_threads() == 1
    mover.close()
    assert copying_threads() == 0
    assert all(torch.equal(region.bytes[:100_000], pattern(number)) for number, region in enumerate(regions))


def test_the_thread_of_a_forgotten_mover_ends(pool: Pool) -> None:
    mover = ThreadMover(CPU)
    mover.land(mover.back(pool.take(1000), 1000, CPU))
    assert copying_threads() == 1
    del mover
    gc.collect()
    wait_for(lambda: copying_threads() == 0)


# -- on a GPU ------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [StreamMover, ThreadMover])
def test_copies_of_a_gpu_wait_for_what_computes_their_bytes(kind: type[StreamMover | ThreadMover]) -> None:
    """Long kernels are in the queue when the copy is asked for; what frees and reuses the memory comes after it."""
    device = torch.device("cuda")
    pool = HostPool(pinned=True) if kind is StreamMover else SpillFile()
    mover = kind(device)
    size = on_gpu(4096, simulated=256)
    a = torch.randn(size, size, device=device)
    flights = []
    for number in range(8):
        product = a @ a
        source = torch.full((product.numel(),), 0, dtype=torch.uint8, device=device)
        source += (product.flatten() * 0).to(torch.uint8) + number
        region = pool.take(source.numel())
        mover.out(source, region, in_flight=2)
        del source  # its memory is that of the next one's, if nothing protects it
        flights.append((number, region))
    for number, region in reversed(flights):
        back = mover.land(mover.back(region, region.size, device))
        assert bool((back[: size * size] == number).all())
    mover.close()
    pool.close()


@pytest.mark.gpu
def test_another_stream_may_use_what_one_stream_asked_for() -> None:
    device = torch.device("cuda")
    pool, mover = HostPool(pinned=True), StreamMover(device)
    other = torch.cuda.Stream()
    region = pool.take(1 << 20)
    with torch.cuda.stream(other):
        source = torch.arange(1 << 20, device=device).to(torch.uint8)
        expected = source.clone()
        mover.out(source, region, in_flight=0)
    other.synchronize()
    flight = mover.back(region, 1 << 20, device)
    with torch.cuda.stream(other):
        assert torch.equal(mover.land(flight), expected)
    mover.close()
    pool.close()


@pytest.mark.gpu
def test_nothing_waits_for_the_gpu() -> None:
    device = torch.device("cuda")
    pool, mover = HostPool(pinned=True), StreamMover(device)
    source = torch.zeros(1 << 20, dtype=torch.uint8, device=device)
    pool.give(pool.take(64 << 20))  # pinning is no part of it
    torch.cuda.set_sync_debug_mode("error")
    try:
        regions = [pool.take(1 << 20) for _ in range(10)]
        for region in regions:
            mover.out(source, region, in_flight=2)
            mover.settle()
        for region in regions:
            mover.land(mover.back(region, 1 << 20, device))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    mover.close()
    pool.close()
