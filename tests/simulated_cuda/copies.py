"""Copies between pinned memory and a device, which go on while the host does.

The values of a copy to the host arrive when the host waits for it: until then the memory holds what nobody can take for
a result. The values of a copy to the device are those of its launch, and are compared with the memory when the host has
waited: whoever has written to it in between has raced with the copy.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._mode_utils import no_dispatch

from simulated_cuda import faults
from simulated_cuda.streams import TIMELINE, Clock, Key, described


@dataclass(eq=False)
class _HostCopy:
    """One that the host has not waited for yet.

    Attributes:
        storage: The pinned memory, which nobody can race for once it is dropped.
        layout: Its tensor's offset, sizes and strides, and dtype.
        expected: The bytes that the memory holds as long as nobody has touched it.
        arriving: What is copied to it, or none.
    """

    stream: Key
    tick: int
    storage: weakref.ref[Any]
    layout: tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype]
    expected: torch.Tensor
    arriving: torch.Tensor | None

    def is_before(self, clock: Clock) -> bool:
        return clock.get(self.stream, 0) >= self.tick

    def tensor(self) -> torch.Tensor | None:
        storage = self.storage()
        offset, sizes, strides, dtype = self.layout
        return None if storage is None else torch.empty(0, dtype=dtype).set_(storage, offset, sizes, strides)

    def finish(self) -> None:
        """What the end of the copy does to the host's memory."""
        tensor = self.tensor()
        if tensor is None:
            return
        if not _are_same(tensor, self.expected):
            what = "a copy to it" if self.arriving is not None else "a copy from it"
            faults.report(f"pinned memory was written to while {what} was under way on {described(self.stream)}")
        if self.arriving is not None:
            tensor.copy_(self.arriving)


_UNDER_WAY: list[_HostCopy] = []


def from_host(stream: Key, tick: int, source: torch.Tensor) -> None:
    """Notes a copy to the device that has been launched."""
    _begin(stream, tick, source, source.clone(), None)


def to_host(stream: Key, tick: int, target: torch.Tensor, values: torch.Tensor) -> None:
    """Launches a copy to pinned memory."""
    arriving = values.to(target.dtype, copy=True)
    _spoil(target, arriving)
    _begin(stream, tick, target, target.clone(), arriving)


def deliver(memory: torch.Tensor, stream: Key, use: str) -> None:
    """Lets a stream see what earlier copies have brought to pinned memory, which it is about to use.

    What the stream waits for is there; for the rest it should have waited.
    """
    address = memory.untyped_storage().data_ptr()
    with TIMELINE.lock:
        clock = TIMELINE.clock(stream)
        for copy in list(_UNDER_WAY):
            storage = copy.storage()
            if storage is None or storage.data_ptr() != address or (copy.arriving is None and use == "reads"):
                continue
            if not copy.is_before(clock):
                faults.report(
                    f"a copy on {described(stream)} {use} pinned memory while another is under way on"
                    f" {described(copy.stream)}, and waits for nothing"
                )
            _UNDER_WAY.remove(copy)
            copy.finish()


def finish_before(clock: Clock) -> None:
    """Ends the copies that the host has waited for, in their order."""
    with no_dispatch():
        for copy in list(_UNDER_WAY):
            if copy.storage() is None:
                _UNDER_WAY.remove(copy)
            elif copy.is_before(clock):
                _UNDER_WAY.remove(copy)
                copy.finish()


def _begin(stream: Key, tick: int, tensor: torch.Tensor, expected: torch.Tensor, arriving: torch.Tensor | None) -> None:
    storage = weakref.ref(tensor.untyped_storage())
    layout = (int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride(), tensor.dtype)
    _UNDER_WAY.append(_HostCopy(stream, tick, storage, layout, expected, arriving))


def _spoil(target: torch.Tensor, arriving: torch.Tensor) -> None:
    """Fills memory with what cannot be taken for the values that will arrive."""
    if target.dtype == torch.bool:
        target.copy_(arriving.logical_not())
    elif target.is_floating_point() or target.is_complex():
        target.fill_(float("nan"))
    else:
        target.copy_(arriving.bitwise_not())


def _are_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(_bytes(one), _bytes(other))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


TIMELINE.when_host_waited = finish_before
