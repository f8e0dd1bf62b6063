"""What the background thread does with a batch: move it and preprocess it, on a stream of its own where there are."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from typing_extensions import override

from lightning_accel.data.batch import Position
from lightning_accel.data.staging import Stager, current_mark, move_plainly, tensors_within


class BatchTransform(Protocol):
    """What prepares batches, on the device or before they go there."""

    @property
    def on_host(self) -> bool:
        """Whether it takes the batch before the transfer."""

    def __call__(self, batch: Any, position: Position, /) -> Any:
        """The batch for the model, made of the loader's: on the device, unless ``on_host``."""


@dataclass(eq=False, slots=True)
class BatchJob:
    """One batch on its way. All is complete once ``done``."""

    position: Position
    batch: Any = None  # as the loader gave it, then as it is handed out
    after: list[torch.cuda.Event] = field(default_factory=list)  # what a device has to have done before
    # What was copied to the device for it. What was made of that may be views whose memory torch does not know to be
    # theirs, as those that went through DLPack.
    arrived: list[Tensor] = field(default_factory=list)
    over: torch.cuda.Event | None = None  # when the device is done with preparing it
    state: Any = None  # the loader's, after the batch was fetched
    error: BaseException | None = None  # what is raised in its place; StopIteration at the loader's end
    done: threading.Event = field(default_factory=threading.Event)


class Lane:
    """The way of one iteration's batches to a device without streams that this package knows of, such as a CPU.

    :meth:`after` and :meth:`hand_out` are called on the consumer's thread, all else on one other.
    """

    def __init__(self, device: torch.device, preprocess: BatchTransform | None) -> None:
        self._device = device
        self._preprocess = preprocess

    def after(self, batch: Any) -> list[torch.cuda.Event]:
        """What the device is still doing to make ``batch``, which was fetched just now."""
        return []

    def working(self) -> AbstractContextManager[object]:
        """Around :meth:`prepare`."""
        return nullcontext()

    def prepare(self, job: BatchJob) -> None:
        """Moves and preprocesses the batch that was fetched."""
        preprocess, batch, job.batch = self._preprocess, job.batch, None
        if preprocess is not None and preprocess.on_host:
            batch = preprocess(batch, job.position)
        batch = self._moved(batch, job)
        if preprocess is not None and not preprocess.on_host:
            batch = preprocess(batch, job.position)
        job.batch = batch

    def hand_out(self, job: BatchJob) -> Any:
        """The batch, for use from here on by what the consumer's thread asks of the device."""
        return job.batch

    def close(self) -> None:
        """Sees what is under way to its end, and lets go of all memory."""

    def _moved(self, batch: Any, job: BatchJob) -> Any:
        # Never non_blocking: https://github.com/pytorch/pytorch/issues/83015 (on MPS the copy reads freed memory).
        return batch if self._device.type == "cpu" else move_plainly(batch, self._device)


class StreamLane(Lane):
    """For CUDA: copies and preprocessing on a side stream, for which the consumer's stream waits and no thread."""

    def __init__(self, side: torch.cuda.Stream, preprocess: BatchTransform | None) -> None:
        super().__init__(side.device, preprocess)
        self._side = side
        self._stager = Stager(side.device)

    @override
    def after(self, batch: Any) -> list[torch.cuda.Event]:
        # A loader may give tensors that are on a GPU, and still being computed there. Those that are not, wait for
        # nothing that the consumer has the GPU do.
        marks = []
        for device in {tensor.device for tensor in tensors_within(batch) if tensor.is_cuda}:
            with torch.cuda.device(device):
                marks.append(current_mark())
        return marks

    @override
    def working(self) -> AbstractContextManager[object]:
        # A thread begins on the first GPU: leaving a stream there would make a context on it, some hundred MiB a rank.
        torch.cuda.set_device(self._device)
        return torch.cuda.stream(self._side)

    @override
    def prepare(self, job: BatchJob) -> None:
        super().prepare(job)
        job.over = current_mark()

    @override
    def hand_out(self, job: BatchJob) -> Any:
        assert job.over is not None
        current = torch.cuda.current_stream(self._device)
        current.wait_event(job.over)
        for tensor in (*job.arrived, *tensors_within(job.batch)):
            if tensor.device == self._device:
                tensor.record_stream(current)  # the allocator knows only of the stream that asked for it
        return job.batch

    @override
    def close(self) -> None:
        with suppress(RuntimeError), torch.cuda.stream(self._side):  # of a device that has failed
            current_mark().synchronize()  # an event of this stream alone: the consumer's goes on
        self._stager.close()

    @override
    def _moved(self, batch: Any, job: BatchJob) -> Any:
        for mark in job.after:
            self._side.wait_event(mark)
        moved, job.arrived = self._stager.move(batch)
        return moved
