"""Missing waits are found: between streams, before memory is reused, and before the host looks."""

from __future__ import annotations

import threading

import pytest
import torch

from simulated_cuda import copies, faults
from simulated_cuda.waits import SYNCHRONISATIONS

pytestmark = [pytest.mark.simulated_gpu, pytest.mark.numbers]


@pytest.fixture(autouse=True)
def _from_the_start() -> None:
    torch.cuda.synchronize()
    faults.taken()


def fresh() -> torch.Tensor:
    """A tensor of the device that the default stream may not have finished writing."""
    return torch.zeros(8, device="cuda").add_(1)


def test_reading_on_another_stream_without_a_wait_is_found() -> None:
    x, stream = fresh(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        y = x * 2
    (fault,) = faults.taken()
    assert "aten.mul.Tensor on stream" in fault
    assert "reads what aten.add_.Tensor on the default stream" in fault
    torch.cuda.synchronize()
    del y


@pytest.mark.parametrize("way", ["wait_stream", "event", "synchronize", "event.synchronize", "item"])
def test_whoever_waits_races_with_nobody(way: str) -> None:
    x, stream, event = fresh(), torch.cuda.Stream(), torch.cuda.Event()
    event.record()
    {
        "wait_stream": lambda: stream.wait_stream(torch.cuda.current_stream()),
        "event": lambda: stream.wait_event(event),
        "synchronize": torch.cuda.synchronize,
        "event.synchronize": event.synchronize,
        "item": lambda: x.sum().item(),
    }[way]()
    with torch.cuda.stream(stream):
        y = x * 2
    torch.cuda.current_stream().wait_stream(stream)
    assert faults.taken() == []
    assert y.sum().item() == 16


def test_an_event_that_was_recorded_too_early_is_no_wait() -> None:
    event = torch.cuda.Event()
    event.record()
    x, stream = fresh(), torch.cuda.Stream()
    stream.wait_event(event)
    with torch.cuda.stream(stream):
        x.sum()
    assert faults.taken()
    torch.cuda.synchronize()


def test_writing_what_another_stream_may_still_read_is_found() -> None:
    x, stream = fresh(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        y = x * 2
    assert faults.taken() == []
    x.zero_()
    assert any("writes what aten.mul.Tensor on stream" in fault for fault in faults.taken())
    torch.cuda.synchronize()
    del y


def test_memory_that_was_just_allocated_on_another_stream_is_found() -> None:
    """What that stream did with it before it was freed may not be over."""
    fresh()
    buffer, stream = torch.empty(8, device="cuda"), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        buffer.zero_()
    assert any("the allocation on the default stream" in fault for fault in faults.taken())
    torch.cuda.synchronize()


@pytest.mark.parametrize("is_told", [False, True])
def test_freeing_what_another_stream_uses_needs_record_stream(is_told: bool) -> None:
    x, stream = fresh(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        y = x * 2
    if is_told:
        x.record_stream(stream)
    del x
    assert bool(faults.taken()) is not is_told
    torch.cuda.synchronize()
    del y


def test_a_copy_to_the_host_arrives_when_somebody_waits_for_it() -> None:
    x = fresh()
    host = x.to("cpu", non_blocking=True)
    assert host.is_pinned()
    assert host.isnan().all()
    torch.cuda.current_stream().synchronize()
    assert host.eq(1).all()


@pytest.mark.parametrize("way", ["to host", "to device"])
def test_pinned_memory_that_is_reused_while_a_copy_is_under_way_is_found(way: str) -> None:
    pinned = torch.ones(8, pin_memory=True)
    if way == "to device":
        x = pinned.to("cuda", non_blocking=True)
    else:
        x = fresh()
        pinned.copy_(x, non_blocking=True)
    pinned.fill_(7)
    torch.cuda.synchronize()
    (fault,) = faults.taken()
    assert "pinned memory was written to while a copy" in fault
    del x


def test_pinned_memory_is_reused_after_a_wait() -> None:
    pinned = torch.ones(8, pin_memory=True)
    x = pinned.to("cuda", non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    event.synchronize()
    pinned.fill_(7)
    torch.cuda.synchronize()
    assert faults.taken() == []
    assert x.eq(1).all().item()


def test_a_thread_that_waited_may_write_while_another_waits_for_the_same_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first to wait looks at the memory, for as long as the second takes to wait as well and to write."""
    pinned = torch.ones(8, pin_memory=True)
    x = pinned.to("cuda", non_blocking=True)
    looks, compare = threading.Event(), copies._are_same

    def slowly(one: torch.Tensor, other: torch.Tensor) -> bool:
        looks.set()
        writer.join(timeout=0.1)
        return compare(one, other)

    def write_after_waiting() -> None:
        looks.wait()
        torch.cuda.synchronize()
        pinned.fill_(7)

    writer = threading.Thread(target=write_after_waiting)
    writer.start()
    monkeypatch.setattr(copies, "_are_same", slowly)
    torch.cuda.synchronize()
    writer.join()
    assert faults.taken() == []
    assert x.eq(1).all().item()


def test_two_copies_of_the_same_pinned_memory_wait_for_each_other() -> None:
    x, pinned, stream = fresh(), torch.empty(8, pin_memory=True), torch.cuda.Stream()
    pinned.copy_(x, non_blocking=True)
    with torch.cuda.stream(stream):
        y = pinned.to("cuda", non_blocking=True)
    assert any("while another is under way" in fault for fault in faults.taken())
    torch.cuda.synchronize()
    pinned.copy_(x, non_blocking=True)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        z = pinned.to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    assert faults.taken() == []
    assert z.eq(1).all().item()
    del y


def test_a_busy_stream_is_not_done_before_its_time() -> None:
    event = torch.cuda.Event()
    torch.cuda._sleep(150_000_000)  # a tenth of a second
    event.record()
    assert not event.query()
    event.synchronize()
    assert event.query()


@pytest.mark.parametrize("what", ["item", "nonzero", "mask", "cpu index", "cpu", "bool"])
def test_synchronisations_are_counted_and_can_be_errors(what: str) -> None:
    x, mask = fresh(), fresh() > 0
    calls = {
        "item": lambda: x.sum().item(),
        "nonzero": lambda: x.nonzero(),
        "mask": lambda: x[mask],
        "cpu index": lambda: x[torch.tensor([1, 2])],
        "cpu": lambda: x.cpu(),
        "bool": lambda: bool(x.sum() > 0),
    }
    before = len(SYNCHRONISATIONS)
    calls[what]()
    assert len(SYNCHRONISATIONS) > before
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="called a synchronizing CUDA operation"):
            calls[what]()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_what_waits_for_nothing_is_not_counted() -> None:
    x, pinned = fresh(), torch.ones(8, pin_memory=True)
    before = len(SYNCHRONISATIONS)
    y = x.add(1).mul_(2)[2:].sum() + pinned.to("cuda", non_blocking=True).sum()
    y.to("cpu", non_blocking=True)
    assert len(SYNCHRONISATIONS) == before
    torch.cuda.synchronize()
