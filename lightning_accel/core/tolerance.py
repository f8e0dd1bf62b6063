"""The one rule by which numbers are judged: a candidate may be off by what the original is off, however it is summed.

A computation in floating point has no one result. The same original gives others when its sums are taken in another,
equally legitimate order: with another number of threads, in two halves of the batch, with the batch turned round, from
inputs that lie otherwise in memory, by another library of kernels. How far these are from the same computation in
float64 is its *spread*; a candidate that is off by more than ``FACTOR`` spreads computes something else. Nothing here
was fitted to a processor: what its libraries do to the original is measured where the run is. See docs/numbers.md.

A spread only grows with the orders that it is measured in. What is within that of a few is within that of all, and so
:class:`Measuring` takes another one only while a candidate is in doubt; an objection stands when all were seen.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
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

APART = 1 + 1 / FACTOR
"""How much farther than from the yardstick it may be from the original's own result: by as much as both are off."""

_BIAS_FLOOR = 1e-3
"""A systematic error below this is not told from the bias of rounding itself."""

_HALF_PRECISION = 1e-4

_SMALLEST = 0.01  # of the largest norm: what is smaller may be zero but for rounding

_AT_ONCE = 1 << 14  # numbers that are widened together on a CPU: they stay in its cache, and in one thread

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
        num_orders: In how many orders the original was seen, here and where it was alike.
        is_whole: Whether these were all that there are.
    """

    allowed: Deviation = Deviation()
    num_orders: int = 0
    is_whole: bool = False

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


class Measuring:
    """The spread of an original, of which only as much is computed as a verdict takes.

    A run that is off by more than the square root of the rounding is no other order of the same sums (batch statistics
    of half a batch, say) and does not count.

    Args:
        expected: The original's own result.
        coarsest: The dtype of the coarsest numbers on the way.
        oracle: Computes the original in float64; None where that cannot be had.
        others: The original in other orders, each computed when it is asked for.
        formulas: The same by formulas that candidates share. Where results agree, gradients may be as far off as one.
        num_results: How many of the tensors are results; those behind them are gradients.
        alike: The spread of the same computation on other numbers: of another layer of a model, say.
    """

    def __init__(
        self,
        expected: Sequence[Tensor],
        coarsest: torch.dtype,
        oracle: Callable[[], Sequence[Tensor] | None] = lambda: None,
        others: Iterable[Sequence[Tensor]] = (),
        alike: Spread = Spread(),
        formulas: Iterable[Sequence[Tensor]] = (),
        num_results: int = 0,
    ) -> None:
        eps = torch.finfo(coarsest).eps
        # In half precision the last rounding is most of the error; above it a library may take a few on the way.
        self._rounding = eps / 2 if eps > _HALF_PRECISION else 2 * eps
        self._expected, self._oracle = expected, oracle
        self._others, self._formulas, self._num_results = iter(others), iter(formulas), num_results
        self._of_formula = Deviation()  # what gradients may be off by for that reason
        self._alike = alike
        self._yardstick: Sequence[Tensor] | None = None
        self._seen, self._num_orders, self._is_whole = Deviation(noise=self._rounding), 0, alike.is_whole

    @property
    def spread(self) -> Spread:
        """As far as it is known: at the least what the dtype rounds off, as no result is nearer than that."""
        # Errors that are independent average out over a result, over the smallest one least.
        averaged = self._seen.noise / math.sqrt(max(1, min((t.numel() for t in self._expected), default=1)))
        allowed_bias = max(FACTOR * max(self._seen.bias, averaged), _BIAS_FLOOR)
        own = Deviation(FACTOR * self._seen.noise, allowed_bias)
        return Spread(own | self._alike.allowed, self._num_orders + self._alike.num_orders, self._is_whole)

    def judged(self, actual: Sequence[Tensor]) -> tuple[Deviation, str]:
        """How far a candidate's result is off, and the objection to that."""
        found = deviation(actual, self._expected, smallest=0.25 * _SMALLEST)
        # Whatever the yardstick is, the original is a spread off it at the most: a candidate that is not off from the
        # original by more than the other three passes. Norms by the one differ from those by the other by the square
        # root of the rounding at the most (hence a quarter above), and so do errors along them, of the whole error.
        near = math.sqrt(self._rounding)
        most = Deviation((1 + near) * found.noise, (1 + near) ** 2 * (found.bias + near * found.noise))
        if not (self.spread.objection(most, 1 - 1 / FACTOR) and self._alike.objection(most, APART)):
            return found, ""
        yardstick = self._ask_oracle()
        found = deviation(actual, yardstick)
        if self.spread.objection(found) and self._is_off_by_formula(actual, yardstick):
            return found, ""
        return found, self.objection(found)

    def _is_off_by_formula(self, actual: Sequence[Tensor], yardstick: Sequence[Tensor]) -> bool:
        """Whether results agree, and gradients are no farther off than those of a formula that candidates share."""
        results, gradients = slice(self._num_results), slice(self._num_results, None)
        is_without_oracle = yardstick is self._expected  # too much memory, perhaps, which a formula may take, too
        if is_without_oracle or self.spread.objection(deviation(actual[results], yardstick[results])):
            return False
        found = deviation(actual[gradients], yardstick[gradients])
        for run in self._formulas:
            off = deviation(run[gradients], yardstick[gradients])
            self._of_formula |= Deviation(APART * off.noise, APART * off.bias)
        return not Spread(self.spread.allowed | self._of_formula).objection(found)

    def objection(self, found: Deviation, times: float = 1.0) -> str:
        """As :meth:`Spread.objection`, by the spread of as many orders as are needed to see that there is none."""
        while (words := self.spread.objection(found, times)) and self._takes_another():
            pass
        return words and Spread(self.spread.allowed | self._of_formula).objection(found, times)

    def _takes_another(self) -> bool:
        if self._yardstick is None:
            self._ask_oracle()
        elif not self._is_whole and (run := next(self._others, None)) is not None:
            self._take(run, self._yardstick)
        else:
            self._is_whole = True
            return False
        return True

    def _ask_oracle(self) -> Sequence[Tensor]:
        """Settles what the yardstick is, and takes the original's own result as the first order."""
        oracle = self._oracle()
        # An original that is far off its oracle (it overflows, its shapes hang on rounding) lets anything pass.
        if oracle is None or not self._take(self._expected, oracle):
            oracle, self._num_orders = self._expected, 1
        self._yardstick = oracle
        return oracle

    def _take(self, run: Sequence[Tensor], yardstick: Sequence[Tensor]) -> bool:
        """Whether a run of the original counts as an order of it."""
        if [t.shape for t in run] != [t.shape for t in yardstick]:
            return False
        found = deviation(run, yardstick)
        if not found.noise <= math.sqrt(self._rounding):
            return False
        self._seen |= found
        self._num_orders += 1
        return True


def deviation(actual: Sequence[Tensor], expected: Sequence[Tensor], *, smallest: float = _SMALLEST) -> Deviation:
    """How far results are from what they should be; infinitely far for a NaN where none belongs.

    A tensor whose true value is zero but for rounding (the bias before a batch norm has such a gradient) is measured
    against ``smallest`` of the largest tensor's norm, a hundredth. Infinities and NaNs must stand in the same places.
    """
    pairs = list(zip(actual, expected, strict=True))
    sums = list(itertools.starmap(_sums, pairs))
    if not all(map(math.isfinite, itertools.chain(*sums))):
        odd = (torch.isnan, torch.isposinf, torch.isneginf)
        if not all(torch.equal(is_odd(got), is_odd(want)) for got, want in pairs for is_odd in odd):
            return Deviation(math.inf, math.inf)
        sums = [_sums(*(torch.nan_to_num(t, nan=0.0, posinf=0.0, neginf=0.0) for t in pair)) for pair in pairs]
    floor = smallest * math.sqrt(max((size for _, _, size in sums), default=0.0))
    worst = Deviation()
    for off, along, size in sums:
        norm = math.sqrt(size)
        worst |= Deviation(math.sqrt(off) / max(norm, floor, 1e-300), abs(along) / size if norm > floor else 0.0)
    return worst


def other_orders(
    call: Call, batch_size: int, device: torch.device, *, new_kernels: bool = True
) -> Iterator[tuple[Call, AbstractContextManager[Any]]]:
    """The same computation in other orders, each with a context to run it in; the dearest last.

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
        if new_kernels:
            # Fewer, never more: a pool of threads that the program did without would stay, and break a later fork.
            yield call, temporarily(torch.get_num_threads, torch.set_num_threads, 1)
        # Not torch.backends.mkldnn.flags, which sets what concerns other devices too, with warnings. Last: torch's own
        # kernels may take many times as long.
        yield call, temporarily(partial(getattr, mkldnn, "enabled"), partial(setattr, mkldnn, "enabled"), False)


def is_batched(tensor: Tensor, batch_size: int) -> bool:
    """Whether the first dimension of ``tensor`` is that of the samples."""
    return tensor.layout == torch.strided and tensor.dim() > 0 and tensor.shape[0] == batch_size


def _transposed_in_memory(tensor: Tensor) -> Tensor:
    """The same values, with the last two dimensions in the other order in memory."""
    is_plain = tensor.layout == torch.strided and tensor.dim() > 1 and not tensor.is_nested
    return tensor.mT.contiguous().mT if is_plain else tensor


def _sums(got: Tensor, want: Tensor) -> list[float]:
    """In float64: of the squares of the differences, of their products with what should be, and of its squares."""
    # Metal has no float64: there the host compares.
    flat = [(tensor.cpu() if tensor.device.type == "mps" else tensor).reshape(-1) for tensor in (got, want)]
    at_once = _AT_ONCE if flat[1].device.type == "cpu" else max(1, want.numel())
    sums = torch.zeros(3, dtype=torch.float64, device=flat[1].device)
    for some, wide in zip(*(torch.split(tensor, at_once) for tensor in flat), strict=True):
        wide = wide.double()
        off = some.double() - wide
        sums += torch.stack([(off * off).sum(), (off * wide).sum(), (wide * wide).sum()])
    found: list[float] = sums.tolist()
    return found
