"""What the background thread does with a batch: move it and preprocess it, on a stream of its own where there are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from typing_extensions import override

from lightning_accel.data.position import Position
from lightning_accel.data.staging import Mark, Stager, current_mark, move_plainly, tensors_within


class BatchTransform(Protocol):
    """What prepares batches, on the device or before they go there."""

    @property
    def on_host(self) -> bool:
        """Whether it takes the batch before the transfer."""

    def __call__(self, batch: Any, position: Position, /) -> Any:
        """The batch for the model.

        Args:
            batch: As the loader gives it; on the device, unless ``on_host``.
            position: Its place in the run.
        """


@dataclass(eq=False, slots=True)
class Prepared:
    """A batch that may be handed out.

    Attributes:
        batch: What the consumer gets.
        arrived: Tensors that were copied to the device for it. What was made of them may be views whose memory torch
            does not know to be theirs, as those that went through DLPack.
        over: When the device is done with preparing it; None: it is.
    """

    batch: Any
    arrived: list[Tensor] = field(default_factory=list)
    over: Mark | None = None


class Lane(ABC):
    """The way of one iteration's batches to the device.

    :meth:`after` and :meth:`hand_out` are called on the consumer's thread; all else on one thread, within
    :meth:`working`.
    """

    def __init__(self, preprocess: BatchTransform | None) -> None:
        self._preprocess = preprocess

    def prepare(self, batch: Any, position: Position, after: list[Mark]) -> Prepared:
        """Moves and preprocesses a batch.

        Args:
            batch: As the loader gave it.
            position: Its place in the run.
            after: What the device has to have done before.
        """
        if self._preprocess is not None and self._preprocess.on_host:
            batch = self._preprocess(batch, position)
        prepared = self._move(batch, after)
        if self._preprocess is not None and not self._preprocess.on_host:
            prepared.batch = self._preprocess(prepared.batch, position)
        return self._finish(prepared)

    def after(self, batch: Any) -> list[Mark]:
        """What the device is still doing to make ``batch``, which was fetched just now."""
        return []

    def begin(self) -> None:  # noqa: B027  # a CPU has nothing to set
        """Called first on the thread that prepares."""

    def working(self) -> AbstractContextManager[object]:
        """Around all that is done on the thread that prepares."""
        return nullcontext()

    def hand_out(self, prepared: Prepared) -> Any:
        """The batch, for use from here on by what the consumer's thread asks of the device."""
        return prepared.batch

    def close(self) -> None:  # noqa: B027  # a CPU has nothing under way
        """Sees what is under way to its end, and lets go of all memory."""

    @abstractmethod
    def _move(self, batch: Any, after: list[Mark]) -> Prepared: ...

    def _finish(self, prepared: Prepared) -> Prepared:
        return prepared


class PlainLane(Lane):
    """For a CPU, where batches are already, and for devices without streams that this package knows of."""

    def __init__(self, device: torch.device, preprocess: BatchTransform | None) -> None:
        super().__init__(preprocess)
        self._device = device

    @override
    def _move(self, batch: Any, after: list[Mark]) -> Prepared:
        # Never non_blocking: https://github.com/pytorch/pytorch/issues/83015 (on MPS the copy reads freed memory).
        return Prepared(batch if self._device.type == "cpu" else move_plainly(batch, self._device))


class StreamLane(Lane):
    """For CUDA: copies and preprocessing on a side stream, for which the consumer's stream waits and no thread.

    Args:
        side: The stream, of the device where batches go.
        preprocess: What runs there after the copies.
    """

    def __init__(self, side: torch.cuda.Stream, preprocess: BatchTransform | None) -> None:
        super().__init__(preprocess)
        self._side = side
        self._stager = Stager(side.device)

    @override
    def after(self, batch: Any) -> list[Mark]:
        # A loader may give tensors that are on a GPU, and still being computed there. Those that are not, wait for
        # nothing that the consumer has the GPU do.
        devices = {tensor.device for tensor in tensors_within(batch) if tensor.is_cuda}
        marks = []
        for device in devices:
            with torch.cuda.device(device):
                marks.append(current_mark())
        return marks

    @override
    def begin(self) -> None:
        # A thread begins on the first GPU: leaving a stream there would make a context on it, some hundred MiB a rank.
        torch.cuda.set_device(self._side.device)

    @override
    def working(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._side)  # which makes its device the current one, too

    @override
    def hand_out(self, prepared: Prepared) -> Any:
        current = torch.cuda.current_stream(self._side.device)
        current.wait_event(prepared.over)  # type: ignore[arg-type]
        for tensor in (*prepared.arrived, *tensors_within(prepared.batch)):
            if tensor.device == self._side.device:
                tensor.record_stream(current)  # the allocator knows only of the stream that asked for it
        return prepared.batch

    @override
    def close(self) -> None:
        with suppress(RuntimeError):  # of a device that has failed
            current_mark().synchronize()  # an event of this stream alone: the consumer's goes on
        self._stager.close()

    @override
    def _move(self, batch: Any, after: list[Mark]) -> Prepared:
        for mark in after:
            self._side.wait_event(mark)  # type: ignore[arg-type]
        return Prepared(*self._stager.move(batch))

    @override
    def _finish(self, prepared: Prepared) -> Prepared:
        prepared.over = current_mark()
        return prepared
