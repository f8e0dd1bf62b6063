"""The same computation in other legitimate orders of its sums."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.backends import mkldnn

from lightning_accel.core.patch import temporarily
from lightning_accel.core.tree import map_tensors, tensors_in
from lightning_accel.experiment.passes import Call


def other_orders(
    call: Call, batch_size: int, device: torch.device, *, new_kernels: bool = True
) -> Iterator[tuple[Call, AbstractContextManager[Any]]]:
    """Yields the same computation in other orders, each with a context to run it in. The most expensive comes last.

    Some are not possible for some computations, or change their meaning: those do not count as orders of the same sums.

    Args:
        call: The original.
        batch_size: The size of the first dimension of whatever is batched.
        device: Where it computes.
        new_kernels: Whether to yield those that need kernels for other shapes or numbers of threads, too.
    """

    def of_samples(change: Callable[[Tensor], Tensor], data: Any) -> Any:
        return map_tensors(lambda tensor: change(tensor) if is_batched(tensor, batch_size) else tensor, data)

    def in_halves(*args: Any, **kwargs: Any) -> Any:
        def part(rows: slice) -> Any:
            some_args, some_kwargs = of_samples(lambda t: t[rows], (args, kwargs))
            return call(*some_args, **some_kwargs)

        half = batch_size // 2
        first, second = part(slice(half)), part(slice(half, None))
        rest = iter(tensors_in(second))
        # A result without samples, such as an average over them, cannot be joined. Its shape shows that.
        return map_tensors(lambda t: torch.cat([t, next(rest)]) if t.dim() and t.shape[0] == half else t, first)

    def turned_round(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = of_samples(lambda t: t.flip(0), (args, kwargs))
        return of_samples(lambda t: t.flip(0), call(*args, **kwargs))

    def lying_otherwise(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = map_tensors(_transposed_in_memory, (args, kwargs))
        return call(*args, **kwargs)

    yield lying_otherwise, nullcontext()
    if batch_size > 1:
        yield turned_round, nullcontext()
        if new_kernels:
            yield in_halves, nullcontext()
    if device.type == "cpu":
        if new_kernels:
            # Never more threads: their pool would stay, and would break a later fork of the program.
            yield call, temporarily(torch.get_num_threads, torch.set_num_threads, 1)
        # torch.backends.mkldnn.flags would set flags of other devices, too, with warnings. This order is last, since
        # torch's own kernels may take many times as long.
        yield call, temporarily(partial(getattr, mkldnn, "enabled"), partial(setattr, mkldnn, "enabled"), False)


def is_batched(tensor: Tensor, batch_size: int) -> bool:
    """Whether the first dimension of ``tensor`` is that of the samples."""
    return tensor.layout == torch.strided and tensor.dim() > 0 and tensor.shape[0] == batch_size


def _transposed_in_memory(tensor: Tensor) -> Tensor:
    """The same values, with the last two dimensions in the other order in memory."""
    is_plain = tensor.layout == torch.strided and tensor.dim() > 1 and not tensor.is_nested
    return tensor.mT.contiguous().mT if is_plain else tensor
