"""How a batch comes to a GPU: through pinned memory that is used again and again, while the GPU computes."""

from __future__ import annotations

import ctypes
import functools
import inspect
import warnings
from abc import ABC
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_accel.core.tree import leaves, map_leaves, tensors_in
from lightning_accel.memory.buffers import HostPool, OffloadingError, Pool, Region

_SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


class Movable(ABC):  # noqa: B024  # no method of its own: it tells classes by theirs
    """Every object whose class has a method ``to``: tensors, transformers' BatchEncoding, PyTorch Geometric's Data.

    Asked of the class, as Lightning does: a dataclass may have a field of that name.
    """

    @classmethod
    def __subclasshook__(cls, subclass: type) -> bool:
        """Whether instances of ``subclass`` have the method."""
        return callable(getattr(subclass, "to", None))


def current_mark() -> torch.cuda.Event:
    """The place that the calling thread's current stream has come to."""
    mark = torch.cuda.Event()  # type: ignore[no-untyped-call]
    mark.record()
    return mark


@dataclass(eq=False, slots=True)
class _Load:
    """What one batch takes along."""

    regions: list[Region] = field(default_factory=list)  # pinned memory that it is copied from
    sources: list[Tensor] = field(default_factory=list)  # its own tensors that it is copied from
    arrived: list[Tensor] = field(default_factory=list)  # tensors on the device


class Stager:
    """Starts copies of batches to a device on the current stream, and waits for none.

    A tensor in pageable memory is copied into a region of pinned memory first, by one core and not by all of them,
    and from there by the device; the region returns to its pool once that copy is over. A tensor that is pinned
    already is copied from where it lies, and kept until then. Call it from one thread. ``pool`` is closed with it.
    """

    def __init__(
        self, device: torch.device, *, pool: Pool | None = None, mark: Callable[[], torch.cuda.Event] = current_mark
    ) -> None:
        self._device = device
        self._pool = pool or HostPool(pinned=True)
        self._mark = mark
        self._flights: deque[tuple[torch.cuda.Event, _Load]] = deque()
        self._may_pin = True

    def move(self, batch: Any) -> tuple[Any, list[Tensor]]:
        """The batch on the device, and every tensor there that was copied for it.

        Structure, shapes, dtypes and ``requires_grad`` stay, and so do strides where no elements share memory or
        leave gaps. What has no ``to`` stays as it is.
        """
        self.settle()
        load = _Load()
        try:
            moved = map_leaves(functools.partial(self._move, load), batch, Movable)
        finally:  # what was started before an error holds its memory, too
            self._flights.append((self._mark(), load))
        return moved, load.arrived

    def settle(self) -> None:
        """Lets go of the memory of copies that are over, without waiting for any."""
        while self._flights and self._flights[0][0].query():  # type: ignore[no-untyped-call]
            for region in self._flights.popleft()[1].regions:
                self._pool.give(region)

    def close(self) -> None:
        """Waits for the copies under way, and lets go of everything."""
        for mark, _ in self._flights:
            with suppress(RuntimeError):  # of a device that has failed, on which no copy is under way
                mark.synchronize()
        self._flights.clear()
        self._pool.close()

    def _move(self, load: _Load, data: Any) -> Any:
        if isinstance(data, Tensor) and _is_plain(data):
            moved = self._copy(load, data.detach()).requires_grad_(data.requires_grad)
            load.arrived.append(moved)
            return moved
        if isinstance(data, Tensor) and data.device == self._device:
            for part in _parts(data):
                if part.is_cuda:  # allocated on the consumer's stream, and about to be read on this one
                    part.record_stream(torch.cuda.current_stream(part.device))
            return data
        load.sources += [tensor for tensor in tensors_within(data) if tensor.is_pinned()]
        moved = move_plainly(data, self._device, non_blocking=True)
        load.arrived += tensors_within(moved)
        return moved

    def _copy(self, load: _Load, source: Tensor) -> Tensor:
        target = torch.empty_like(source, device=self._device)
        if source.numel() == 0:
            return target
        is_as_stored = target.stride() == source.stride() and not source.is_conj() and not source.is_neg()
        if is_as_stored and source.is_pinned():
            load.sources.append(source)
            return target.copy_(source, non_blocking=True)
        region = self._take(source.nbytes)
        if region is None:
            return target.copy_(source, non_blocking=True)
        load.regions.append(region)
        staged = region.bytes[: source.nbytes].view(source.dtype).as_strided(target.size(), target.stride())
        if is_as_stored:
            # Not copy_(), for which this thread would start threads of its own, as many as there are cores.
            ctypes.memmove(staged.data_ptr(), source.data_ptr(), source.nbytes)
        else:
            staged.copy_(source)
        return target.copy_(staged, non_blocking=True)

    def _take(self, nbytes: int) -> Region | None:
        if not self._may_pin:
            return None
        try:
            return self._pool.take(nbytes)
        except OffloadingError as error:
            self._may_pin = False
            warnings.warn(
                "Batches are copied to the device from memory that is not pinned, which is slower:"
                f" {str(error).partition('. ')[0]}. Raise the limit on locked memory"
                " (ulimit -l), or make batches or depth smaller.",
                RuntimeWarning,
                stacklevel=2,
            )
            return None


def move_plainly(batch: Any, device: torch.device, *, non_blocking: bool = False) -> Any:
    """``batch`` with everything that has a method ``to`` moved by it, ``non_blocking`` where that takes it."""

    def move(data: Any) -> Any:
        moved = data.to(device, non_blocking=True) if non_blocking and _takes_non_blocking(data) else data.to(device)
        if moved is None:  # it moves itself, and does not say so
            return data
        return moved.requires_grad_() if isinstance(data, Tensor) and data.requires_grad else moved

    return map_leaves(move, batch, Movable)


def tensors_within(data: Any) -> list[Tensor]:
    """Every tensor with memory of its own in ``data``, those among the attributes of movable objects too."""
    found: list[Tensor] = []
    for leaf in leaves(data):
        if isinstance(leaf, Tensor):
            found += _parts(leaf)
        elif isinstance(leaf, Movable) and hasattr(leaf, "__dict__"):
            found += [part for tensor in tensors_in(vars(leaf)) for part in _parts(tensor)]
    return found


def _parts(tensor: Tensor) -> list[Tensor]:
    """Plain tensors that have the memory of a tensor that is sparse, nested, quantised, or wraps others."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        return [part for name in names for part in _parts(getattr(tensor, name))]
    if tensor.layout is torch.sparse_coo and tensor.is_coalesced():
        return [tensor.indices(), tensor.values()]
    if tensor.layout in _SPARSE:
        plain: Any = tensor.detach()
        return tensors_in(plain.__reduce_ex__(2))  # what a pickle would hold, which coalesces nothing
    if tensor.is_nested or tensor.is_quantized:  # record_stream() takes neither
        return [torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())]
    return [tensor]


def _is_plain(tensor: Tensor) -> bool:
    """Whether its elements are all there is to it, and lie in the host's memory."""
    has_more = tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized
    return type(tensor) is Tensor and tensor.is_cpu and not has_more


def _takes_non_blocking(data: Any) -> bool:
    if isinstance(data, Tensor):
        return True
    try:
        parameters = inspect.signature(data.to).parameters
    except ValueError:  # written in C, without a signature
        return False
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return takes_any or "non_blocking" in parameters
