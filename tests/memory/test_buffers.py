"""Pools hand memory out, take it back, hand it out again; a file's is neither resident nor left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import psutil
import pytest
import torch

from lightning_accel.memory.buffers import HostPool, OffloadingError, Pool, Region, SpillFile
from support.memory.limits import limited, resource

KIB, MIB = 1 << 10, 1 << 20
POOLS: dict[str, Callable[[], Pool]] = {"host": lambda: HostPool(pinned=False), "file": SpillFile}


@pytest.fixture(params=POOLS)
def pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    made = POOLS[request.param]()
    yield made
    made.close()


def files_end_at(nbytes: int) -> AbstractContextManager[None]:
    """A disk that is full: no file can be made larger than ``nbytes``."""
    return limited(resource.RLIMIT_FSIZE, nbytes)


def place(region: Region) -> int:
    return region.bytes.data_ptr()


def test_what_is_given_back_is_handed_out_again(pool: Pool) -> None:
    first = pool.take(100 * KIB)
    there, total = place(first), pool.total_bytes
    pool.give(first)
    assert place(pool.take(100 * KIB)) == there
    assert pool.total_bytes == total


def test_sizes_that_change_a_little_share_a_region(pool: Pool) -> None:
    """As they do with sequences of another length in every batch."""
    first = pool.take(101 * KIB)
    pool.give(first)
    assert place(pool.take(99 * KIB)) == place(first)


def test_a_small_tensor_does_not_take_a_large_region(pool: Pool) -> None:
    large = pool.take(100 * MIB)
    pool.give(large)
    assert pool.take(4 * KIB).size < 64 * KIB
    assert pool.take(100 * MIB).size == large.size
    assert pool.total_bytes < 140 * MIB


def test_regions_do_not_overlap(pool: Pool) -> None:
    regions = [pool.take(size * KIB) for size in (3, 70, 5, 300, 1, 64, 9)]
    for number, region in enumerate(regions):
        region.bytes.fill_(number)
    assert all(bool((region.bytes == number).all()) for number, region in enumerate(regions))


def test_the_bytes_handed_out_are_counted(pool: Pool) -> None:
    regions = [pool.take(10 * KIB), pool.take(50 * KIB)]
    assert pool.live_bytes == sum(region.size for region in regions)
    assert 60 * KIB <= pool.live_bytes <= pool.total_bytes
    for region in regions:
        pool.give(region)
    assert pool.live_bytes == 0


def test_regions_are_on_the_host_whatever_the_default_device(pool: Pool) -> None:
    with torch.device("meta"):
        assert pool.take(KIB).bytes.device.type == "cpu"


def test_few_segments_serve_many_tensors() -> None:
    file = SpillFile()
    maps = len({id(region.mapping) for region in [file.take(MIB) for _ in range(200)]})
    assert maps < 30
    assert file.total_bytes < 250 * MIB
    file.close()


def test_host_memory_that_cannot_be_had_is_an_error_with_the_mend() -> None:
    pool = HostPool(pinned=False)
    with pytest.raises(OffloadingError, match=r"no .*GiB more of host memory.*Raise min_bytes.*'disk'"):
        pool.take(1 << 60)


# -- the file ------------------------------------------------------------------------------------------------------


def test_the_file_has_no_name(tmp_path: Path) -> None:
    file = SpillFile(str(tmp_path))
    file.take(MIB)
    assert list(tmp_path.iterdir()) == []
    file.close()


def test_pages_that_are_let_go_are_not_resident_and_not_lost() -> None:
    file = SpillFile()
    region = file.take(96 * MIB)
    resident = psutil.Process().memory_info().rss
    region.bytes.fill_(7)
    written = psutil.Process().memory_info().rss - resident
    file.let_go(region)
    left = psutil.Process().memory_info().rss - resident
    assert written > 90 * MIB
    assert left < 10 * MIB
    assert bool((region.bytes == 7).all())
    file.close()


def test_letting_a_region_go_leaves_its_neighbours_as_they_are() -> None:
    file = SpillFile()
    regions = [file.take(size) for size in (5, 5000, 50_000)]
    for number, region in enumerate(regions):
        region.bytes.fill_(number)
        file.let_go(region)
    assert all(bool((region.bytes == number).all()) for number, region in enumerate(regions))
    file.close()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_closed_file_is_gone_with_its_last_region(tmp_path: Path) -> None:
    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count(str(tmp_path))

    def descriptors() -> int:
        return psutil.Process().num_fds()

    before = mapped(), descriptors()
    file = SpillFile(str(tmp_path))
    region = file.take(MIB)
    file.close()
    region.bytes.fill_(1)  # still there for whoever holds it
    assert mapped() == 1
    del region
    assert (mapped(), descriptors()) == before


def test_a_full_disk_is_an_error_that_says_where_how_much_and_what_to_do(tmp_path: Path) -> None:
    file = SpillFile(str(tmp_path))
    expected = rf"(?s)needs 4\.0 MiB more in '{tmp_path}'.*GiB free.*file is removed.*folder.*min_bytes.*'host'"
    with files_end_at(MIB), pytest.raises(OffloadingError, match=expected):
        file.take(4 * MIB)
    file.close()


def test_a_disk_with_room_for_the_tensor_and_no_more_will_do() -> None:
    """Segments are made larger than what is asked for, which must not be what fills the disk."""
    file = SpillFile()
    with files_end_at(9 * MIB):
        file.take(8 * MIB)
        file.take(MIB)
        with pytest.raises(OffloadingError):
            file.take(4 * KIB)
    assert file.total_bytes == 9 * MIB
    file.close()


KILLED = """
import sys, time
from lightning_accel.memory.buffers import SpillFile
file = SpillFile(sys.argv[1])
file.take(1 << 20).bytes.fill_(1)
print("made", flush=True)
time.sleep(60)
"""


@pytest.mark.medium
@pytest.mark.skipif(sys.platform == "win32", reason="has no SIGKILL")
def test_a_killed_process_leaves_no_file(tmp_path: Path) -> None:
    folder = tmp_path / "spill"
    folder.mkdir()
    with subprocess.Popen([sys.executable, "-c", KILLED, str(folder)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "made\n"
        os.kill(process.pid, signal.SIGKILL)
    assert list(folder.iterdir()) == []


@pytest.mark.gpu
def test_host_memory_for_a_gpu_is_pinned_and_every_region_of_it() -> None:
    pool = HostPool(pinned=True)
    assert all(pool.take(size).bytes.is_pinned() for size in (4 * KIB, 3 * MIB, 100 * KIB))
    pool.close()


@pytest.mark.gpu
def test_pinned_memory_is_taken_in_the_sizes_that_torch_rounds_to() -> None:
    pool = HostPool(pinned=True)
    pool.take(33 * MIB)
    assert pool.total_bytes == 64 * MIB
    pool.take(20 * MIB)
    assert pool.total_bytes == 64 * MIB
    pool.close()
