"""The meter knows what is allocated: at every mark, at most in between, and what it did not see allocated."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.profiler import profile

from lightning_accel.core.peak_memory import PeakMemory
from lightning_accel.memory.meter import Meter, MeterBusyError, device_memory_bytes, meter_for

KIB = 1024


@pytest.fixture
def meter() -> Meter:
    return meter_for(torch.device("cpu"))


def kibibytes(count: int) -> torch.Tensor:
    return torch.empty(count * KIB, dtype=torch.uint8)


def test_levels_and_peaks_between_marks(meter: Meter) -> None:
    meter.start()
    first = kibibytes(4)
    meter.mark("held")
    second = kibibytes(2)
    del second
    meter.mark("given back")
    del first
    found = {interval.mark: (interval.level_bytes, interval.peak_bytes) for interval in meter.stop()}
    assert found == {
        "start": (0, 4 * KIB),
        "held": (4 * KIB, 6 * KIB),
        "given back": (4 * KIB, 4 * KIB),
    }


def test_what_is_alive_at_the_start_counts_once_a_storage(meter: Meter) -> None:
    tensor = kibibytes(4)
    meter.start([tensor, tensor[:10], tensor.view(2, -1)])
    (interval,) = meter.stop()
    assert interval.level_bytes == 4 * KIB


def test_memory_from_before_is_noticed_when_it_goes(meter: Meter) -> None:
    """The profiler does not report it: as with the gradients that a step drops."""
    old = [kibibytes(4)]
    meter.start(old)
    old.clear()
    meter.mark("gone")
    new = kibibytes(1)
    found = {interval.mark: interval.peak_bytes for interval in meter.stop()}
    del new
    assert found == {"start": 4 * KIB, "gone": 1 * KIB}


def test_garbage_of_before_is_not_collected_in_the_midst(meter: Meter) -> None:
    """Which would be taken for memory of the step, given back."""
    meter.start()  # what the profiler never saw allocated it does not report
    ring: list[Any] = [kibibytes(4)]
    ring.append(ring)
    meter.stop()
    end = weakref.ref(ring[0].untyped_storage())
    del ring
    meter.start()
    made = [[] for _ in range(1_000_000)]  # a collection, or several
    is_there = end() is not None
    del made
    assert is_there
    assert [interval.level_bytes for interval in meter.stop()] == [0]
    assert gc.isenabled()


def test_memory_from_an_earlier_metering_is_not_counted_off_twice(meter: Meter) -> None:
    meter.start()
    seen = [kibibytes(4)]
    meter.stop()
    meter.start(seen)
    seen.clear()
    meter.mark("gone")
    assert [interval.level_bytes for interval in meter.stop()] == [4 * KIB, 0]


def test_memory_made_between_two_meterings_is_noticed_again(meter: Meter) -> None:
    meter.start()
    kept = [kibibytes(4)]
    meter.stop()
    kept[:] = [kibibytes(2)]
    meter.start(kept)
    kept.clear()
    meter.mark("gone")
    assert [interval.level_bytes for interval in meter.stop()] == [2 * KIB, 0]


def test_memory_at_an_address_that_an_earlier_metering_knew_is_not_counted_off_twice(meter: Meter) -> None:
    """The profiler reports its end too, by what it last saw allocated there."""
    meter.start()
    size_kib = 64 * KIB  # past what any heap keeps: mapped each time, hence where it was before
    earlier = kibibytes(size_kib)
    meter.stop()
    address = earlier.data_ptr()
    del earlier
    later = [kibibytes(size_kib)]
    assert later[0].data_ptr() == address
    meter.start(later)
    later.clear()
    meter.mark("gone")
    assert [interval.level_bytes for interval in meter.stop()] == [size_kib * KIB, 0]


def users_profiler() -> profile:
    return profile(acc_events=True)  # or torch 2.11 warns that it would not


@pytest.fixture
def others_profiler() -> Iterator[None]:
    with users_profiler():
        yield


def test_somebody_elses_profiler_is_left_in_peace(meter: Meter, others_profiler: None) -> None:
    with pytest.raises(MeterBusyError, match="another profiler"):
        meter.start()


def test_somebody_elses_profiler_may_begin_in_the_midst(meter: Meter) -> None:
    meter.start()
    with users_profiler() as users:
        torch.ones(3).exp()
    with pytest.raises(MeterBusyError, match="another profiler began"):
        meter.stop()
    assert any(event.name == "aten::exp" for event in users.events())
    meter.start()
    meter.stop()


def test_an_aborted_metering_leaves_nothing(meter: Meter) -> None:
    meter.start()
    meter.abort()
    meter.abort()
    meter.mark("late")
    with users_profiler():
        pass


def test_a_machine_has_some_memory() -> None:
    assert device_memory_bytes(torch.device("cpu")) > 2**28


@pytest.mark.gpu
def test_the_gpus_allocator_is_read_at_every_mark() -> None:
    device = torch.device("cuda")
    meter = meter_for(device)
    meter.start()
    first = torch.empty(2**22, device=device)
    meter.mark("held")
    second = torch.empty(2**22, device=device)
    del second
    meter.mark("given back")
    start, held, given_back = meter.stop()
    assert held.level_bytes - start.level_bytes == first.untyped_storage().nbytes()
    assert held.peak_bytes - held.level_bytes == first.untyped_storage().nbytes()
    assert given_back.level_bytes == held.level_bytes


@pytest.mark.gpu
def test_the_gpus_meter_leaves_other_windows_their_peaks() -> None:
    device = torch.device("cuda")
    window = PeakMemory(device)
    window.restart()
    size = torch.empty(2**22, device=device).untyped_storage().nbytes()  # and it is gone
    meter_for(device).start()
    assert window.peak_bytes() >= size
