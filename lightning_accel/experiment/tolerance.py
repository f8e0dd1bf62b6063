"""The one rule for numbers: the candidate's error may be as large as the original's own rounding error.

The original itself gives other results if its sums are taken in another legitimate order: with another number of
threads, in two halves of the batch, with the samples reversed, from inputs in another memory layout. The *spread* is
the distance of these results from the same computation in float64. A candidate whose error exceeds ``FACTOR`` spreads
computes something else. No constant was fitted to a processor: each run measures its own spread. See docs/numbers.md.

A spread only grows with the number of orders. So :class:`Measuring` computes another order only while a candidate is in
doubt, and objects only after all orders.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import InitVar, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.backends import mkldnn

from lightning_accel.core.patch import temporarily
from lightning_accel.core.tree import map_tensors, tensors_in
from lightning_accel.experiment.passes import Call

FACTOR = 4.0
"""The error that a candidate may have, in spreads. A few samples show a spread's size, but not its largest value."""

APART = 1 + 1 / FACTOR
"""A candidate may differ more from the original's own result than from float64, since both have errors."""

_BIAS_FLOOR = 1e-3
"""Below this, a systematic error cannot be distinguished from the bias of rounding."""

_HALF_PRECISION = 1e-4

_SMALLEST = 0.01  # a share of the largest norm: a smaller tensor may be zero apart from rounding

_AT_ONCE = 1 << 14  # numbers that a CPU converts to float64 at once: they fit into its cache and one thread


@dataclass(frozen=True)
class Deviation:
    """The distance of one result from another."""

    noise: float = 0.0  # the largest relative error: the norm of the difference over the norm of the true result
    # The largest relative error in the direction of the result itself: 0.01 for a scale that is off by 1%. Pure noise
    # has little of it.
    bias: float = 0.0

    def __or__(self, other: Deviation) -> Deviation:
        return Deviation(max(self.noise, other.noise), max(self.bias, other.bias))


@dataclass(frozen=True)
class Spread:
    """The allowed error of a candidate."""

    allowed: Deviation = Deviation()  # the largest deviation that passes
    num_orders: int = 0  # in which the original was computed, here and for similar computations
    is_whole: bool = False  # whether these were all possible orders

    def objection(self, found: Deviation, times: float = 1.0) -> str:
        """Describes how a deviation exceeds ``times`` the allowed one; empty if it does not."""
        for what, off, allowed in (
            ("relative error", found.noise, times * self.allowed.noise),
            ("systematic error", found.bias, times * self.allowed.bias),
        ):
            if not off <= allowed:  # NaN is too far
                return f"other numbers than the original: {what} {off:.1e}, allowed {allowed:.1e}"
        return ""


@dataclass(eq=False)
class Measuring:
    """Measures the spread of an original, as far as a verdict needs it.

    A run whose error exceeds the square root of the rounding is not another order of the same sums, and does not count.
    An example are batch statistics of half a batch.
    """

    expected: Sequence[Tensor]  # the original's own result
    coarsest: torch.dtype  # of the dtypes in the computation
    oracle: Callable[[], Sequence[Tensor] | None] = lambda: None  # computes the original in float64, if it can
    others: InitVar[Iterable[Sequence[Tensor]]] = ()  # the original in other orders, computed on request
    alike: Spread = Spread()  # the spread of a similar computation, such as another layer of the model
    formulas: Iterable[Sequence[Tensor]] = ()  # the original by other formulas, whose errors gradients may have
    num_results: int = 0  # the number of tensors that are results: the others are gradients

    def __post_init__(self, others: Iterable[Sequence[Tensor]]) -> None:
        eps = torch.finfo(self.coarsest).eps
        # In half precision, the last rounding is most of the error. In wider dtypes, a library may round several times.
        self._rounding = eps / 2 if eps > _HALF_PRECISION else 2 * eps
        self._others = iter(others)
        self._of_formula = Deviation()  # the error that gradients may have because of a formula
        self._yardstick: Sequence[Tensor] | None = None
        self._seen, self._num_orders, self._is_whole = Deviation(noise=self._rounding), 0, self.alike.is_whole

    @property
    def spread(self) -> Spread:
        """Returns the spread as far as it is known, at least the rounding of the dtype."""
        # Independent errors average out over a result; least over the smallest result.
        averaged = self._seen.noise / math.sqrt(max(1, min((t.numel() for t in self.expected), default=1)))
        allowed_bias = max(FACTOR * max(self._seen.bias, averaged), _BIAS_FLOOR)
        own = Deviation(FACTOR * self._seen.noise, allowed_bias)
        return Spread(own | self.alike.allowed, self._num_orders + self.alike.num_orders, self._is_whole)

    def judged(self, actual: Sequence[Tensor]) -> tuple[Deviation, str]:
        """Returns the deviation of a candidate, and the objection to it; empty if there is none."""
        found = deviation(actual, self.expected, smallest=0.25 * _SMALLEST)
        # The original's distance from the unknown float64 result is at most one spread. So a candidate passes if it
        # differs from the original by at most three of the four allowed spreads. The norms of both results differ by at
        # most the square root of the rounding (hence the quarter above). So do the errors along them, as a share.
        near = math.sqrt(self._rounding)
        most = Deviation((1 + near) * found.noise, (1 + near) ** 2 * (found.bias + near * found.noise))
        if not (self.spread.objection(most, 1 - 1 / FACTOR) and self.alike.objection(most, APART)):
            return found, ""
        yardstick = self._ask_oracle()
        found = deviation(actual, yardstick)
        if self.spread.objection(found) and self._is_off_by_formula(actual, yardstick):
            return found, ""
        return found, self.objection(found)

    def _is_off_by_formula(self, actual: Sequence[Tensor], yardstick: Sequence[Tensor]) -> bool:
        """Returns whether results agree, and gradients have no larger error than a formula that candidates share."""
        results, gradients = slice(self.num_results), slice(self.num_results, None)
        is_without_oracle = yardstick is self.expected  # perhaps for lack of memory, which a formula may need, too
        if is_without_oracle or self.spread.objection(deviation(actual[results], yardstick[results])):
            return False
        found = deviation(actual[gradients], yardstick[gradients])
        for run in self.formulas:
            off = deviation(run[gradients], yardstick[gradients])
            self._of_formula |= Deviation(APART * off.noise, APART * off.bias)
        return not Spread(self.spread.allowed | self._of_formula).objection(found)

    def objection(self, found: Deviation, times: float = 1.0) -> str:
        """Returns the objection of :meth:`Spread.objection`; computes more orders while there is one."""
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
        """Computes the float64 result, and counts the original's own result as the first order."""
        oracle = self.oracle()
        # If the original is far from its oracle (it overflows, or its shapes depend on rounding), anything would pass.
        if oracle is None or not self._take(self.expected, oracle):
            oracle, self._num_orders = self.expected, 1
        self._yardstick = oracle
        return oracle

    def _take(self, run: Sequence[Tensor], yardstick: Sequence[Tensor]) -> bool:
        """Adds a run of the original to the spread. Returns whether it counts as an order of the same sums."""
        if [t.shape for t in run] != [t.shape for t in yardstick]:
            return False
        found = deviation(run, yardstick)
        if not found.noise <= math.sqrt(self._rounding):
            return False
        self._seen |= found
        self._num_orders += 1
        return True


def deviation(actual: Sequence[Tensor], expected: Sequence[Tensor], *, smallest: float = _SMALLEST) -> Deviation:
    """Returns the deviation of results from the true ones; infinite if NaNs or infinities are in other places.

    The true value of a tensor may be zero apart from rounding, as for the gradient of a bias before a batch norm. Such
    a tensor is compared with a share, ``smallest``, of the largest tensor's norm.
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

    Some computations do not allow some orders, or get another meaning: those do not count as orders of the same sums.
    Without ``new_kernels``, orders that need kernels for other shapes or numbers of threads are left out.
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
        # A result without a batch dimension, such as a mean over samples, cannot be joined. Its shape shows that.
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
            # Never more threads: their pool would stay, and break a later fork of the program.
            yield call, temporarily(torch.get_num_threads, torch.set_num_threads, 1)
        # torch.backends.mkldnn.flags would set flags of other devices, too, with warnings. This order comes last,
        # since torch's own kernels may take many times as long.
        yield call, temporarily(partial(getattr, mkldnn, "enabled"), partial(setattr, mkldnn, "enabled"), False)


def is_batched(tensor: Tensor, batch_size: int) -> bool:
    """Returns whether the first dimension of ``tensor`` is the batch dimension."""
    return tensor.layout == torch.strided and tensor.dim() > 0 and tensor.shape[0] == batch_size


def _transposed_in_memory(tensor: Tensor) -> Tensor:
    """Returns the same values with the last two dimensions in the other order in memory."""
    is_plain = tensor.layout == torch.strided and tensor.dim() > 1 and not tensor.is_nested
    return tensor.mT.contiguous().mT if is_plain else tensor


def _sums(got: Tensor, want: Tensor) -> list[float]:
    """Returns sums in float64: of squared differences, of differences times true results, of squared true results."""
    # Metal has no float64, so the host compares.
    flat = [(tensor.cpu() if tensor.device.type == "mps" else tensor).reshape(-1) for tensor in (got, want)]
    at_once = _AT_ONCE if flat[1].device.type == "cpu" else max(1, want.numel())
    sums = torch.zeros(3, dtype=torch.float64, device=flat[1].device)
    for some, wide in zip(*(torch.split(tensor, at_once) for tensor in flat), strict=True):
        wide = wide.double()
        off = some.double() - wide
        sums += torch.stack([(off * off).sum(), (off * wide).sum(), (wide * wide).sum()])
    found: list[float] = sums.tolist()
    return found
