"""What a GPU's streams are asked for, and in which order, on streams and events that are simulated."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_accel.data import staging
from lightning_accel.data.batch import Position
from lightning_accel.data.pipeline_iteration import Iteration, PipelineRun
from lightning_accel.data.pipeline_lanes import StreamLane
from lightning_accel.memory.buffers import HostPool
from support.pipeline_loaders import Transform, double, no_thread_is_left, pipeline_threads

__all__ = ["no_thread_is_left"]


class SimulatedStream:
    device = torch.device("cpu")

    def __init__(self, log: list[tuple[Any, ...]], name: str) -> None:
        self.log = log
        self.name = name

    def wait_event(self, event: Any) -> None:
        self.log.append((self.name, "waits", event.number))


class SimulatedGPU:
    """One device with the consumer's stream and a side stream, which notes what it is asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.pools: list[HostPool] = []
        self.side = SimulatedStream(self.log, "side")
        self.consumers = SimulatedStream(self.log, "consumer's")
        self.thread = threading.local()
        gpu = self

        class SimulatedEvent:
            def __init__(self) -> None:
                self.number = -1

            def record(self) -> None:
                self.number = sum(entry[1] == "marks" for entry in gpu.log)
                gpu.log.append((gpu.current().name, "marks", self.number))

            def query(self) -> bool:
                return False

            def synchronize(self) -> None:
                gpu.log.append(("host", "waits", self.number))

        class NotPinned(HostPool):
            def __init__(self, *, pinned: bool) -> None:
                super().__init__(pinned=False)
                gpu.pools.append(self)

        @contextmanager
        def on(stream: SimulatedStream) -> Iterator[None]:
            self.thread.stream = stream
            yield
            del self.thread.stream

        def record(tensor: Tensor, stream: SimulatedStream) -> None:
            self.log.append((stream.name, "uses", tensor.data_ptr()))

        monkeypatch.setattr(staging, "HostPool", NotPinned)
        monkeypatch.setattr(torch.cuda, "Event", SimulatedEvent)
        monkeypatch.setattr(torch.cuda, "stream", on)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: self.log.append(("thread", "begins", device)))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.current())
        monkeypatch.setattr(Tensor, "record_stream", record)

    def current(self) -> SimulatedStream:
        return getattr(self.thread, "stream", self.consumers)

    def iterate(self, batches: list[Any], preprocess: Any = None) -> Iteration:
        lane = StreamLane(self.side, preprocess)  # type: ignore[arg-type]
        return Iteration(PipelineRun(iter(batches), lane, Position, 2, in_background=False))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimulatedGPU:
    return SimulatedGPU(monkeypatch)


def test_the_thread_is_on_the_gpu_of_its_stream_before_anything_else(gpu: SimulatedGPU) -> None:
    """Otherwise it would make a context on the first GPU, whichever is its own."""
    list(gpu.iterate([torch.ones(2), torch.zeros(2)]))
    begun = [place for place, entry in enumerate(gpu.log) if entry[:2] == ("thread", "begins")]
    assert begun[0] == 0


def test_an_error_as_the_thread_begins_surfaces(gpu: SimulatedGPU, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(device: Any) -> None:
        raise ArithmeticError("the GPU is gone")

    monkeypatch.setattr(torch.cuda, "set_device", fails)
    with pytest.raises(ArithmeticError):
        next(gpu.iterate([torch.ones(2)]))


def test_the_consumers_stream_waits_for_the_batch_that_is_handed_out(gpu: SimulatedGPU) -> None:
    """Of two marks a batch the second comes after preprocessing: 1, 3, 5."""
    batches = gpu.iterate([torch.ones(2), torch.zeros(2), torch.ones(1)], Transform(double))
    assert [batch.tolist() for batch in batches] == [[2, 2], [0, 0], [2]]
    assert [entry for entry in gpu.log if entry[:2] == ("consumer's", "waits")] == [
        ("consumer's", "waits", number) for number in (1, 3, 5)
    ]
    assert all(entry[0] == "side" for entry in gpu.log if entry[1] == "marks")


def test_the_side_stream_waits_for_nothing(gpu: SimulatedGPU) -> None:
    list(gpu.iterate([torch.ones(2)] * 5, Transform(double)))
    assert [entry for entry in gpu.log if entry[:2] == ("side", "waits")] == []


def test_the_allocator_is_told_of_outputs_and_of_what_they_were_made_of(gpu: SimulatedGPU) -> None:
    arrived: list[Tensor] = []
    batches = gpu.iterate([torch.ones(2)], Transform(lambda batch: arrived.append(batch) or batch + 1))
    output = next(batches)
    used = {entry[2] for entry in gpu.log if entry[:2] == ("consumer's", "uses")}
    assert used == {output.data_ptr(), arrived[0].data_ptr()}


def test_transforms_for_the_host_come_before_the_copy(gpu: SimulatedGPU) -> None:
    source = torch.ones(2)
    seen: list[int] = []
    transform = Transform(lambda batch: seen.append(batch.data_ptr()) or batch, on_host=True)
    assert next(gpu.iterate([source], transform)).data_ptr() != source.data_ptr()
    assert seen == [source.data_ptr()]


@pytest.mark.parametrize("end", ["exhausted", "closed", "dropped"])
def test_however_it_ends_copies_are_waited_for_and_the_pool_is_closed(gpu: SimulatedGPU, end: str) -> None:
    batches = gpu.iterate([torch.ones(2)] * 9)
    next(batches)
    assert gpu.pools[0].total_bytes > 0
    if end == "exhausted":
        list(batches)
    elif end == "closed":
        batches.close()
    del batches
    assert pipeline_threads() == []
    assert gpu.pools[0].total_bytes == 0
    last = max(entry[2] for entry in gpu.log if entry[1] == "marks")
    assert ("host", "waits", last) in gpu.log


def test_an_error_half_way_through_a_batch_is_no_different(gpu: SimulatedGPU) -> None:
    class Broken:
        def to(self, device: torch.device, non_blocking: bool = False) -> None:
            raise ConnectionError

    batches = gpu.iterate([torch.ones(2), [torch.ones(2), Broken()]])
    next(batches)
    with pytest.raises(ConnectionError):
        next(batches)
    assert pipeline_threads() == []
    assert gpu.pools[0].total_bytes == 0
