"""What the background thread does with a batch: move it and preprocess it, on a stream of its own where there are."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from typing_extensions import override

from lightning_accel.data.position import Position
from lightning_accel.data.staging import Stager, current_mark, move_plainly, tensors_within


class BatchTransform(Protocol):
    """What prepares batches, on the device or before they go there."""

    @property
    def on_host(self) -> bool:
        """Whether it takes the batch before the transfer."""

    def __call__(self, batch: Any, position: Position, /) -> Any:
        """The batch for the model, made of the loader's: on the device, unless ``on_host``."""


@dataclass(eq=False, slots=True)
class Prepared:
    """A batch that may be handed out."""

    batch: Any
    # What was copied to the device for it. What was made of that may be views whose memory torch does not know to be
    # theirs, as those that went through DLPack.
    arrived: list[Tensor] = field(default_factory=list)
    over: torch.cuda.Event | None = None  # when the device is done with preparing it; None: it is


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

    def prepare(self, batch: Any, position: Position, after: list[torch.cuda.Event]) -> Prepared:
        """Moves and preprocesses a batch of the loader's; ``after``: what the device has to have done before."""
        preprocess = self._preprocess
        if preprocess is not None and preprocess.on_host:
            batch = preprocess(batch, position)
        prepared = self._move(batch, after)
        if preprocess is not None and not preprocess.on_host:
            prepared.batch = preprocess(prepared.batch, position)
        return prepared

    def hand_out(self, prepared: Prepared) -> Any:
        """The batch, for use from here on by what the consumer's thread asks of the device."""
        return prepared.batch

    def close(self) -> None:
        """Sees what is under way to its end, and lets go of all memory."""

    def _move(self, batch: Any, after: list[torch.cuda.Event]) -> Prepared:
        # Never non_blocking: https://github.com/pytorch/pytorch/issues/83015 (on MPS the copy reads freed memory).
        return Prepared(batch if self._device.type == "cpu" else move_plainly(batch, self._device))


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
    def prepare(self, batch: Any, position: Position, after: list[torch.cuda.Event]) -> Prepared:
        prepared = super().prepare(batch, position, after)
        prepared.over = current_mark()
        return prepared

    @override
    def hand_out(self, prepared: Prepared) -> Any:
        assert prepared.over is not None
        current = torch.cuda.current_stream(self._device)
        current.wait_event(prepared.over)
        for tensor in (*prepared.arrived, *tensors_within(prepared.batch)):
            if tensor.device == self._device:
                tensor.record_stream(current)  # the allocator knows only of the stream that asked for it
        return prepared.batch

    @override
    def close(self) -> None:
        with suppress(RuntimeError), torch.cuda.stream(self._side):  # of a device that has failed
            current_mark().synchronize()  # an event of this stream alone: the consumer's goes on
        self._stager.close()

    @override
    def _move(self, batch: Any, after: list[torch.cuda.Event]) -> Prepared:
        for mark in after:
            self._side.wait_event(mark)
        return Prepared(*self._stager.move(batch))
