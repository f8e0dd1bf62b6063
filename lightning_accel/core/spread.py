"""The one rule by which numbers are judged: a candidate may be off by what the original is off, however it is summed.

A computation in floating point has no one result. The same original gives others when its sums are taken in another,
equally legitimate order: with another number of threads, in two halves of the batch, with the batch turned round, from
inputs that lie otherwise in memory, by another library of kernels. How far these are from the same computation in
float64 is its *spread*; a candidate that is off by more than ``FACTOR`` spreads computes something else. Nothing here
was fitted to a processor: what its libraries do to the original is measured where the run is. See docs/numbers.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.backends import mkldnn

from lightning_accel.core.patch import temporarily
from lightning_accel.core.tree import map_tensors, tensors_in

FACTOR = 4.0
"""How many spreads a candidate may be off: a handful of samples shows the order of a spread, not its end."""

_BIAS_FLOOR = 1e-3
"""A systematic error below this is not told from the bias of rounding itself."""

_HALF_PRECISION = 1e-4

Call = Callable[..., Any]


@dataclass(frozen=True)
class Deviation:
    """How far one result is from another.

    Attributes:
        noise: The largest norm of a difference over the norm of what it should be.
        bias: The largest relative error along the result itself, which noise has little of: 0.01 for a scale that is
            off by 1%.
    """

    noise: float = 0.0
    bias: float = 0.0

    def __or__(self, other: Deviation) -> Deviation:
        return Deviation(max(self.noise, other.noise), max(self.bias, other.bias))


@dataclass(frozen=True)
class Spread:
    """What a candidate may be off by.

    Attributes:
        allowed: The largest deviation that is let pass.
        num_orders: In how many orders the original was seen.
    """

    allowed: Deviation
    num_orders: int

    def objection(self, found: Deviation, times: float = 1.0) -> str:
        """How ``found`` is too far off, in words; empty where it is not.

        Args:
            found: How far a candidate is off.
            times: How many times as much is allowed, where more than the candidate is off.
        """
        for what, off, allowed in (
            ("relative error", found.noise, times * self.allowed.noise),
            ("systematic error", found.bias, times * self.allowed.bias),
        ):
            if not off <= allowed:  # NaN is too far
                return f"other numbers than the original: {what} {off:.1e}, allowed {allowed:.1e}"
        return ""


def measured(yardstick: Sequence[Tensor], runs: Sequence[Sequence[Tensor]], coarsest: torch.dtype) -> Spread:
    """The spread of ``runs`` of the original around ``yardstick``.

    A run that is off by more than the square root of the rounding is no other order of the same sums (batch statistics
    of half a batch, say) and does not count.

    Args:
        yardstick: The original in float64, or its own result.
        runs: The original in several orders.
        coarsest: The dtype of the coarsest numbers on the way.
    """
    eps = torch.finfo(coarsest).eps
    # In half precision the last rounding is most of the error; above it a library may take a few on the way.
    rounding = eps / 2 if eps > _HALF_PRECISION else 2 * eps
    spread, num_orders = Deviation(noise=rounding), 0  # no result is nearer than what its dtype rounds off
    for run in runs:
        if [t.shape for t in run] == [t.shape for t in yardstick]:
            found = deviation(run, yardstick)
            if found.noise <= math.sqrt(rounding):
                spread |= found
                num_orders += 1
    # Errors that are independent average out over a result, over the smallest one least.
    averaged = spread.noise / math.sqrt(max(1, min((t.numel() for t in yardstick), default=1)))
    allowed_bias = max(FACTOR * max(spread.bias, averaged), _BIAS_FLOOR)
    return Spread(Deviation(FACTOR * spread.noise, allowed_bias), num_orders)


def deviation(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> Deviation:
    """How far results are from what they should be; infinitely far for a NaN where none belongs.

    A tensor whose true value is zero but for rounding (the bias before a batch norm has such a gradient) is measured
    against a hundredth of the largest tensor's norm. Infinities and NaNs must stand in the same places.
    """
    norms = [float(torch.linalg.vector_norm(_finite_part(t))) for t in expected]
    floor = max(norms, default=0.0) / 100
    worst = Deviation()
    for got, want, norm in zip(actual, expected, norms, strict=True):
        if not all(torch.equal(is_odd(got), is_odd(want)) for is_odd in (torch.isnan, torch.isposinf, torch.isneginf)):
            return Deviation(math.inf, math.inf)
        wide = _finite_part(want)
        off = _finite_part(got) - wide
        noise = float(torch.linalg.vector_norm(off)) / max(norm, floor, 1e-300)
        bias = abs(float((off * wide).sum())) / norm**2 if norm > floor else 0.0
        worst |= Deviation(noise, bias)
    return worst


def other_orders(
    call: Call, batch_size: int, device: torch.device, *, new_kernels: bool = True
) -> Iterator[tuple[Call, AbstractContextManager[Any]]]:
    """The same computation in other orders, each with a context to run it in.

    Not all are possible for every computation, and not all leave its meaning: :func:`measured` sorts those out.

    Args:
        call: The original.
        batch_size: The size of the first dimension of whatever is batched.
        device: Where it computes.
        new_kernels: Whether also those that need kernels for other shapes or numbers of threads.
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
        # A result without samples (an average over them) cannot be put together: its shape tells.
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
        # Not torch.backends.mkldnn.flags, which sets what concerns other devices too, with warnings.
        yield call, temporarily(partial(getattr, mkldnn, "enabled"), partial(setattr, mkldnn, "enabled"), False)
        if new_kernels:
            # Fewer, never more: a pool of threads that the program did without would stay, and break a later fork.
            yield call, temporarily(torch.get_num_threads, torch.set_num_threads, 1)


def is_batched(tensor: Tensor, batch_size: int) -> bool:
    """Whether the first dimension of ``tensor`` is that of the samples."""
    return tensor.layout == torch.strided and tensor.dim() > 0 and tensor.shape[0] == batch_size


def _transposed_in_memory(tensor: Tensor) -> Tensor:
    """The same values, with the last two dimensions in the other order in memory."""
    is_plain = tensor.layout == torch.strided and tensor.dim() > 1 and not tensor.is_nested
    return tensor.mT.contiguous().mT if is_plain else tensor


def _finite_part(tensor: Tensor) -> Tensor:
    # Metal has no float64: there the host compares.
    wide = (tensor.cpu() if tensor.device.type == "mps" else tensor).double()
    return torch.nan_to_num(wide, nan=0.0, posinf=0.0, neginf=0.0)
