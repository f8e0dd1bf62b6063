"""The one rule by which numbers are judged: the candidate's error may be as large as the original's own rounding error.

The same original gives other results if its sums are taken in another legitimate order: with another number of threads,
in two halves of the batch, with the samples reversed, from inputs in another memory layout. The *spread* is how far
these are from the same computation in float64. A candidate that is off by more than ``FACTOR`` spreads computes
something else. Nothing here was fitted to a processor: the spread is measured where the run is. See docs/numbers.md.

A spread only grows with the number of orders. So :class:`Measuring` computes another order only while a candidate is in
doubt, and objects only after it has seen all.
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
from lightning_accel.experiment.passes import Call

FACTOR = 4.0
"""How many spreads a candidate may be off. A few samples show the size of a spread, but not its largest value."""

APART = 1 + 1 / FACTOR
"""A candidate may differ more from the original's own result than from float64, since both are off."""

_BIAS_FLOOR = 1e-3
"""Below this, a systematic error cannot be told apart from the bias of rounding."""

_HALF_PRECISION = 1e-4

_SMALLEST = 0.01  # a share of the largest norm: a smaller tensor may be zero except for rounding

_AT_ONCE = 1 << 14  # numbers that a CPU converts to float64 together: they stay in its cache and in one thread


@dataclass(frozen=True)
class Deviation:
    """How far one result is from another.

    Attributes:
        noise: The largest relative error: the norm of the difference over the norm of the true result.
        bias: The largest relative error in the direction of the result itself: 0.01 for a scale that is off by 1%. Pure
            noise has little of it.
    """

    noise: float = 0.0
    bias: float = 0.0

    def __or__(self, other: Deviation) -> Deviation:
        return Deviation(max(self.noise, other.noise), max(self.bias, other.bias))


@dataclass(frozen=True)
class Spread:
    """How far a candidate may be off.

    Attributes:
        allowed: The largest deviation that passes.
        num_orders: The number of orders in which the original was computed, here and for similar computations.
        is_whole: Whether these were all orders that there are.
    """

    allowed: Deviation = Deviation()
    num_orders: int = 0
    is_whole: bool = False

    def objection(self, found: Deviation, times: float = 1.0) -> str:
        """How a result is too far off, in words; empty if it is not. ``times`` is a factor on what is allowed."""
        for what, off, allowed in (
            ("relative error", found.noise, times * self.allowed.noise),
            ("systematic error", found.bias, times * self.allowed.bias),
        ):
            if not off <= allowed:  # NaN is too far
                return f"other numbers than the original: {what} {off:.1e}, allowed {allowed:.1e}"
        return ""


class Measuring:
    """Measures the spread of an original, as far as a verdict needs it.

    If a run is off by more than the square root of the rounding, it is no other order of the same sums, and it does not
    count. Batch statistics of half a batch are an example.
    """

    def __init__(
        self,
        expected: Sequence[Tensor],  # the original's own result
        coarsest: torch.dtype,  # of the dtypes in the computation
        oracle: Callable[[], Sequence[Tensor] | None] = lambda: None,  # computes the original in float64, if it can
        others: Iterable[Sequence[Tensor]] = (),  # the original in other orders, each computed when it is asked for
        alike: Spread = Spread(),  # of a similar computation, such as another layer of the model
        formulas: Iterable[Sequence[Tensor]] = (),  # the original by others, as far off as which gradients may be
        num_results: int = 0,  # how many of the tensors are results: the others are gradients
    ) -> None:
        eps = torch.finfo(coarsest).eps
        # In half precision, the last rounding is most of the error. In wider dtypes, a library may round a few times.
        self._rounding = eps / 2 if eps > _HALF_PRECISION else 2 * eps
        self._expected, self._oracle = expected, oracle
        self._others, self._formulas, self._num_results = iter(others), iter(formulas), num_results
        self._of_formula = Deviation()  # how far gradients may be off because of a formula
        self._alike = alike
        self._yardstick: Sequence[Tensor] | None = None
        self._seen, self._num_orders, self._is_whole = Deviation(noise=self._rounding), 0, alike.is_whole

    @property
    def spread(self) -> Spread:
        """The spread as far as it is known. It is at least the rounding of the dtype."""
        # Independent errors average out over a result, and least over the smallest one.
        averaged = self._seen.noise / math.sqrt(max(1, min((t.numel() for t in self._expected), default=1)))
        allowed_bias = max(FACTOR * max(self._seen.bias, averaged), _BIAS_FLOOR)
        own = Deviation(FACTOR * self._seen.noise, allowed_bias)
        return Spread(own | self._alike.allowed, self._num_orders + self._alike.num_orders, self._is_whole)

    def judged(self, actual: Sequence[Tensor]) -> tuple[Deviation, str]:
        """How far a candidate is off, and the objection to that; empty if there is none."""
        found = deviation(actual, self._expected, smallest=0.25 * _SMALLEST)
        # The original is at most one spread off the float64 result, whatever that is. So a candidate passes if it
        # differs from the original by no more than the other three. The norms of both results differ by at most the
        # square root of the rounding (hence the quarter above). So do the errors along them, as a share of the error.
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
        """Whether results agree, and gradients are no farther off than by a formula that candidates share."""
        results, gradients = slice(self._num_results), slice(self._num_results, None)
        is_without_oracle = yardstick is self._expected  # perhaps for lack of memory, which a formula may need, too
        if is_without_oracle or self.spread.objection(deviation(actual[results], yardstick[results])):
            return False
        found = deviation(actual[gradients], yardstick[gradients])
        for run in self._formulas:
            off = deviation(run[gradients], yardstick[gradients])
            self._of_formula |= Deviation(APART * off.noise, APART * off.bias)
        return not Spread(self.spread.allowed | self._of_formula).objection(found)

    def objection(self, found: Deviation, times: float = 1.0) -> str:
        """As :meth:`Spread.objection`. It computes more orders while there is an objection."""
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
        """Computes the float64 result, and takes the original's own result as the first order."""
        oracle = self._oracle()
        # If the original is far off its oracle (it overflows, or its shapes depend on rounding), anything would pass.
        if oracle is None or not self._take(self._expected, oracle):
            oracle, self._num_orders = self._expected, 1
        self._yardstick = oracle
        return oracle

    def _take(self, run: Sequence[Tensor], yardstick: Sequence[Tensor]) -> bool:
        """Takes a run of the original into account. Returns whether it counts as an order of the same sums."""
        if [t.shape for t in run] != [t.shape for t in yardstick]:
            return False
        found = deviation(run, yardstick)
        if not found.noise <= math.sqrt(self._rounding):
            return False
        self._seen |= found
        self._num_orders += 1
        return True


def deviation(actual: Sequence[Tensor], expected: Sequence[Tensor], *, smallest: float = _SMALLEST) -> Deviation:
    """How far results are from the true ones; infinitely far if there is a NaN where none belongs.

    The true value of a tensor may be zero except for rounding: the gradient of a bias before a batch norm is. Such a
    tensor is measured against a share, ``smallest``, of the largest tensor's norm. Infinities and NaNs must be in the
    same places.
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
    """Yields the same computation in other orders, each with a context to run it in. The most expensive comes last.

    Some are not possible for some computations, or change their meaning: those do not count as orders of the same sums.
    Without ``new_kernels``, those that need kernels for other shapes or numbers of threads are left out.
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


def _sums(got: Tensor, want: Tensor) -> list[float]:
    """Three sums in float64: squares of differences, their products with the true result, and squares of the latter."""
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
