"""Trials: the original against a candidate, on the user's own first input. Same numbers? Not slower?

A trial leaves no trace in the run: random streams, buffers, gradients and dispatch modes are as they were. It calls
both sides again and again: give it torch's own operations on tensors, not code that somebody may be watching.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_accel.core.clocks import Stopwatch
from lightning_accel.core.device import CONVOLUTIONS, dtype_of_products
from lightning_accel.core.dropout import dropout_off
from lightning_accel.core.isolation import isolated
from lightning_accel.core.measured import Measurement
from lightning_accel.core.module_copies import silent_copy
from lightning_accel.core.purse import TRIALS, Purse
from lightning_accel.core.random_streams import TORCHS, same_state
from lightning_accel.core.state_snapshot import Level, StateSnapshot
from lightning_accel.core.time_calls import time_calls
from lightning_accel.core.tolerance import APART, FACTOR, Measuring, Spread, deviation, is_batched, other_orders
from lightning_accel.core.tree import map_tensors, tensors_in
from lightning_accel.core.trial_passes import Call, Passes

ORACLE_SAMPLES = 4
ORACLE_MAX_BYTES = 2 << 30
ORACLE_MAX_SAVED_BYTES = 1 << 29  # of activations: more would take longer in float64 than it tells
MIN_PAIRS, MAX_PAIRS = 1, 3  # that are timed; live trials on whole steps are what judges in the end
CLEARLY = 0.15  # by so much one side has to be the faster for less than the most pairs
_WIDE = 6.0  # times as long as a candidate's call the original takes in float64, about
NOT_SLOWER = 1.02  # a time this close to the original's is a tie: the clocks of shared machines tell no more

VerdictKind = Literal["kept", "refused", "failed", "untried", "too_dear"]
"""What a trial can come to. Only the first two say something of the candidate: the others may be tried again."""

_TOO_DEAR = "not tried to its end: it would cost more than this run can pay"


@dataclass(frozen=True)
class TrialSide:
    """One side of a trial.

    Attributes:
        call: The computation, called with the site's own arguments.
        state: Entered around it, untimed: whatever makes the model ready for this side.
        arguments: Makes of the arguments the form in which this side takes them, untimed: another layout, in which its
            results may lie, too.
    """

    call: Call
    state: Callable[[], AbstractContextManager[Any]] = nullcontext
    arguments: Callable[[Any, Any], tuple[Any, Any]] | None = None

    def given(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments in this side's form."""
        return (args, kwargs) if self.arguments is None else self.arguments(args, kwargs)


@dataclass(frozen=True, kw_only=True)
class NumbersComparison:
    """What a trial measured.

    Attributes:
        failure: What the candidate raised, or how its numbers differ; empty if they agree.
        cut_short: Whether the trial ended early: ``"failed"`` with an error, or ``"too_dear"`` for the purse.
        error: The candidate's largest relative error, against the oracle where one was asked.
        original_ms: Milliseconds of the original, forward and backward, the fewest that were seen; None untimed.
        candidate_ms: The candidate's.
        left_behind: Buffers, attributes and inputs that the forward pass changed (and the trial restored).
        spread: What it may be off by, as far as that had to be measured.
        is_same: Whether the candidate's numbers are the original's, to the bit; None where that was not asked.
    """

    failure: str = ""
    cut_short: Literal["", "failed", "too_dear"] = ""
    error: float = 0.0
    original_ms: float | None = None
    candidate_ms: float | None = None
    left_behind: tuple[str, ...] = ()
    spread: Spread | None = None
    is_same: bool | None = None

    @property
    def kind(self) -> VerdictKind:
        """What the trial came to, as far as numbers say."""
        return self.cut_short or ("refused" if self.failure else "kept")

    def measured(self, timed: NumbersComparison | None = None) -> Measurement:
        """The figures of numbers, and of times where those are another comparison's."""
        timed = timed or self
        return Measurement(
            error=None if self.spread is None else self.error,
            spread=None if self.spread is None else self.spread.allowed.noise / FACTOR,
            is_same=self.is_same,
            original_ms=timed.original_ms,
            candidate_ms=timed.candidate_ms,
        )


class _TooDearError(Exception):
    """There is not enough left for another call."""


@dataclass
class Trial:
    """Two ways to compute one thing, on one set of arguments.

    Attributes:
        module: The module whose parameters take part; one without any for a computation of its arguments alone.
        args: The positional arguments, as the user's code passed them.
        kwargs: The keyword arguments.
        with_gradients: Whether to compare and time the backward pass too.
        samples: How many samples of the batch the oracle sees, so that it never exhausts the memory; None: all.
        max_pairs: How many pairs are timed at the most.
        judged: Takes from the outputs what is to be compared.
        wide: The original, for arguments in float64; by default ``forward`` of a copy of the module in float64.
        has_dropout: Whether dropout stays on while numbers are compared, for what would be compiled anew without.
        keeps_strides: Whether outputs have to lie in memory as the original's do.
        keeps_kernels: Whether the library builds a kernel for every shape, dtype and number of threads, and keeps it:
            then the original is asked on the whole batch only, and its own result is the yardstick.
        purse: What has to be able to pay for another call, as long as the one before, or the trial ends; None: no end.
        alike: The spread of the same computation on other numbers of the same shapes, so far as it was measured.
        formulas: The same computation by formulas that candidates share: their gradients may be as far off.
        convolves: Whether there are convolutions in it that are no modules.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    with_gradients: bool = True
    samples: int | None = ORACLE_SAMPLES
    max_pairs: int = MAX_PAIRS
    judged: Callable[[Any], Any] = lambda outputs: outputs
    wide: Call | None = None
    has_dropout: bool = False
    keeps_strides: bool = True
    keeps_kernels: bool = False
    purse: Purse | None = None
    alike: Spread = field(default_factory=Spread)
    formulas: Sequence[TrialSide] = ()
    convolves: bool = False

    def __post_init__(self) -> None:
        tensors = [*self.module.parameters(), *tensors_in((self.args, self.kwargs))]
        sizes = [t.shape[0] for t in tensors_in((self.args, self.kwargs)) if not t.is_nested and t.dim() > 0]
        self._device = tensors[0].device if tensors else torch.device("cpu")
        self._batch_size = sizes[0] if sizes else 0
        self._passes = Passes(self.module, self.with_gradients, self.judged)
        self._drawn: set[str] = set()  # from which streams of others than torch, which nobody replays
        self._is_warm = False  # whether both sides were called before
        self._unpaid = Stopwatch()

    def numbers(self, original: TrialSide, candidate: TrialSide, *, in_other_orders: bool = True) -> NumbersComparison:
        """Compares outputs and, ``with_gradients``, the gradients of inputs and parameters.

        The oracle is the original in float64, without autocast, on a few samples; what the original is off from it in
        several orders of its sums is what the candidate may be off (:mod:`lightning_accel.core.tolerance`), on the
        whole batch too. Where there can be no oracle, the original's own result takes its place. Dropout is off while
        a few samples show that, and on for the whole batch: what is drawn, and for which element, has to be the same.

        With ``in_other_orders=False``, for a candidate that does the original's operations in the original's order,
        both are called once, on ``samples`` of the batch, with the same random numbers.
        """
        compared = self._by_spread if in_other_orders else self._by_rounding
        found, left_behind = self._ended(lambda: compared(original, candidate))
        if self._passes.writes_to_input:
            left_behind.append("its input")
        return replace(found, left_behind=(*left_behind, *sorted(self._drawn)))

    def rehearse(self, side: TrialSide) -> NumbersComparison:
        """Runs one side once, forward and backward: what is done at its first call only, is done by then."""
        timed = time_calls({0: lambda: self._ready(side)}, self._device)
        return self._ended(lambda: NumbersComparison(candidate_ms=1e3 * next(timed)[0]))[0]

    def time(self, original: TrialSide, candidate: TrialSide) -> NumbersComparison:
        """Times both, forward and backward, in turns, and oftener while neither is clearly the faster.

        A refusal is for good, where a candidate that is kept meets live trials: it takes two pairs at the least. So do
        calls that :meth:`numbers` has not warmed up.
        """
        return self._ended(lambda: self._times(original, candidate))[0]

    def _ended(self, tried: Callable[[], NumbersComparison]) -> tuple[NumbersComparison, list[str]]:
        """What came out, and what was found changed; nothing that is raised goes further."""
        left_behind: list[str] = []
        self._unpaid.lap()
        try:
            with isolated(self.module, self._device) as left_behind:
                found = tried()
        except _TooDearError:
            found = NumbersComparison(failure=_TOO_DEAR, cut_short="too_dear")
        except Exception as error:
            found = NumbersComparison(failure=f"failed in its trial: {one_line(error)}", cut_short="failed")
        self._is_warm = True
        self._pay()
        return found, left_behind

    def _pay(self) -> float:
        """Pays for what was done since the last call; that is what the next may take, too."""
        spent_s = self._unpaid.lap()
        if self.purse is not None:
            self.purse.pay(TRIALS, spent_s)
        return spent_s

    def _ask_purse(self, times: float = 1.0) -> None:
        if self.purse is not None and not self.purse.can_pay(times * self._pay()):
            raise _TooDearError

    def _times(self, original: TrialSide, candidate: TrialSide) -> NumbersComparison:
        before, after = math.inf, math.inf
        least = MIN_PAIRS if self._is_warm else 2
        most = min(MAX_PAIRS, max(self.max_pairs, least))
        rounds = time_calls({0: lambda: self._ready(original), 1: lambda: self._ready(candidate)}, self._device)
        for pairs, took in enumerate(itertools.islice(rounds, most), start=1):
            # Whatever else a machine does can only add to a time.
            before, after = min(before, took[0]), min(after, took[1])
            is_faster, is_slower = after < (1 - CLEARLY) * before, before < (1 - CLEARLY) * after
            if pairs >= least and (is_faster or (is_slower and pairs > 1)):
                break
        return NumbersComparison(original_ms=1e3 * before, candidate_ms=1e3 * after)

    @contextmanager
    def _ready(self, side: TrialSide) -> Iterator[Callable[[], object]]:
        """Prepares a pass of one side to be timed.

        Raises:
            _TooDearError: The purse cannot pay for it.
        """
        self._ask_purse()
        with side.state():
            yield self._passes.prepared(side.call, *side.given(self.args, self.kwargs))

    # -- numbers -----------------------------------------------------------------------------------------------

    def _by_rounding(self, original: TrialSide, candidate: TrialSide) -> NumbersComparison:
        args, kwargs = self.args, self.kwargs
        if self.samples is not None:
            with original.state(), self._streams():
                args, kwargs = self._samples(original.call)
        expected, actual, otherwise = self._both(original, candidate, args, kwargs)
        found = self._judge(Measuring(expected, self._coarsest(expected)), expected, actual)
        return replace(found, failure=found.failure or otherwise)

    def _by_spread(self, original: TrialSide, candidate: TrialSide) -> NumbersComparison:
        with self._without_dropout() as dropped:
            with original.state(), self._streams():
                args, kwargs = self._samples(original.call)
            expected, actual, otherwise = self._both(original, candidate, args, kwargs)
            measuring = Measuring(
                expected,
                self._coarsest(actual),
                lambda: self._oracle(original, args, kwargs),
                self._in_other_orders(original, args, kwargs),
                self.alike,
                self._by_formulas(args, kwargs),
                self._passes.num_outputs,
            )
            found = self._judge(measuring, expected, actual)
        found = replace(found, failure=found.failure or otherwise)
        if not found.failure and (dropped or args is not self.args):
            *whole, otherwise = self._both(original, candidate, self.args, self.kwargs)
            objection = self._objection(measuring, *whole)
            if objection and dropped:
                objection = f"its random numbers fall on other elements than the original's: {objection}"
            found = replace(found, spread=measuring.spread, failure=otherwise or objection)
        return found

    def _without_dropout(self) -> AbstractContextManager[list[float]]:
        return nullcontext(list[float]()) if self.has_dropout else dropout_off(self.module)

    def _both(
        self, original: TrialSide, candidate: TrialSide, args: Any, kwargs: Any
    ) -> tuple[list[Tensor], list[Tensor], str]:
        """Both sides' results, and what of the candidate's is otherwise beside its numbers."""
        expected, before = self._once(original, args, kwargs)
        actual, after = self._once(candidate, args, kwargs)
        if not all(map(same_state, before, after)):
            return expected, actual, "draws another amount of random numbers than the original"
        outputs = zip(expected, actual[: self._passes.num_outputs], strict=False)
        is_free = candidate.arguments is not None or not self.keeps_strides
        is_alike = is_free or all(itertools.starmap(_lie_alike, outputs))
        return expected, actual, "" if is_alike else "its results lie otherwise in memory than the original's"

    def _once(self, side: TrialSide, args: Any, kwargs: Any) -> tuple[list[Tensor], list[Any]]:
        """What it computes, and the states of the random streams after that. Each run begins with the same ones."""
        self._ask_purse()
        with self._streams() as before, side.state():
            results = self._passes.results(side.call, *side.given(args, kwargs))
            self._drawn |= {*before.drawn()} - TORCHS
            return results, list(self._streams().random_states.values())

    def _streams(self) -> StateSnapshot:
        return StateSnapshot(None, Level.RANDOM, self._device)

    def _samples(self, call: Call) -> tuple[Any, Any]:
        """The first few samples of the arguments; all of them where the computation wants its whole batch."""
        if self.samples is None or self.keeps_kernels or self._batch_size <= self.samples:
            return self.args, self.kwargs
        few = slice(self.samples)
        sliced: tuple[Any, Any] = map_tensors(
            lambda t: t[few] if is_batched(t, self._batch_size) else t, (self.args, self.kwargs)
        )
        try:
            with torch.no_grad():
                copies = map_tensors(Tensor.clone, sliced)
                call(*copies[0], **copies[1])
        except Exception:  # (T, B, D) inputs, masks of the batch's size
            return self.args, self.kwargs
        return sliced

    def _in_other_orders(self, original: TrialSide, args: Any, kwargs: Any) -> Iterator[list[Tensor]]:
        size = self._batch_size if args is self.args else self.samples or 0
        for call, setting in other_orders(original.call, size, self._device, new_kernels=not self.keeps_kernels):
            try:
                with self._without_dropout(), setting:
                    run, _ = self._once(TrialSide(call, original.state), args, kwargs)
            except _TooDearError:
                raise
            except Exception:  # no order for this computation: views of its input, kernels that want oneDNN
                continue
            yield run

    def _by_formulas(self, args: Any, kwargs: Any) -> Iterator[list[Tensor]]:
        for formula in self.formulas:
            try:
                with self._without_dropout():
                    run, _ = self._once(formula, args, kwargs)
            except _TooDearError:
                raise
            except Exception:  # no formula for this computation
                continue
            yield run

    def _oracle(self, original: TrialSide, args: Any, kwargs: Any) -> list[Tensor] | None:
        """The original in float64; None where that cannot be had, or would take too much memory."""
        if self.keeps_kernels or sum(p.numel() * 8 for p in self.module.parameters()) > ORACLE_MAX_BYTES:
            return None
        tensors = (*self.module.parameters(), *self.module.buffers(), *tensors_in((args, kwargs)))
        if any(t.is_complex() for t in tensors):  # whose imaginary part .to(torch.float64) would drop
            return None
        self._ask_purse(_WIDE)
        try:
            with self._without_dropout(), self._streams(), original.state():
                if self.with_gradients:
                    saved_bytes = 8 * self._passes.saved_elements(original.call, args, kwargs)
                    if saved_bytes > ORACLE_MAX_SAVED_BYTES:
                        return None
                reference = silent_copy(self.module, torch.float64)
                args, kwargs = map_tensors(lambda t: t.double() if t.is_floating_point() else t, (args, kwargs))
                passes = replace(self._passes, module=reference, writes_to_input=False)
                with torch.autocast(self._device.type, enabled=False):
                    return passes.results(self.wide or reference.forward, args, kwargs)
        except Exception:  # not every computation has float64 kernels: the original's own result remains
            return None

    def _coarsest(self, results: Sequence[Tensor]) -> torch.dtype:
        dtypes = [t.dtype for t in results if t.is_floating_point()]
        if torch.is_autocast_enabled(self._device.type):  # a float32 result may be the sum of bfloat16 products
            dtypes.append(torch.get_autocast_dtype(self._device.type))
        elif torch.float32 in dtypes:
            convolves = self.convolves or any(isinstance(module, CONVOLUTIONS) for module in self.module.modules())
            dtypes += filter(None, [dtype_of_products(self._device, convolves=convolves)])
        return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)

    # -- verdicts ----------------------------------------------------------------------------------------------

    def _judge(self, measuring: Measuring, expected: list[Tensor], actual: list[Tensor]) -> NumbersComparison:
        """Whether the candidate is within the spread of the original."""
        if [t.shape for t in actual] != [t.shape for t in expected]:
            return NumbersComparison(failure="returns tensors of other shapes than the original")
        if not expected:
            return NumbersComparison(failure="returns no tensors that could be compared with the original's")
        found, failure = measuring.judged(actual)
        return NumbersComparison(
            failure=failure,
            error=found.noise,
            spread=measuring.spread,
            is_same=_are_same(expected, actual),
        )

    def _objection(self, measuring: Measuring, expected: list[Tensor], actual: list[Tensor]) -> str:
        """What is wrong with the whole batch, where a few samples of it were right."""
        if [t.shape for t in actual] != [t.shape for t in expected]:
            return "returns tensors of other shapes than the original for the whole batch"
        # A sum over more samples is off by more, as a random walk is.
        walked = (self._batch_size / (self.samples or self._batch_size)) ** 0.5
        pairs = list(zip(actual, expected, strict=True))
        for of_samples, times in ((True, APART), (False, APART * walked)):
            chosen = [pair for pair in pairs if is_batched(pair[1], self._batch_size) is of_samples]
            objection = measuring.objection(deviation(*zip(*chosen, strict=True)), times) if chosen else ""
            if objection:
                return f"on the whole batch, {objection}"
        return ""


def _are_same(expected: Sequence[Tensor], actual: Sequence[Tensor]) -> bool:
    pairs = list(zip(expected, actual, strict=False))
    return len(expected) == len(actual) and all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


def _lie_alike(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of a shape have the same strides, where there is more than one element to go through."""
    strides = zip(one.shape, one.stride(), other.stride(), strict=False)
    return not one.numel() or all(size == 1 or first == second for size, first, second in strides)


def one_line(error: BaseException) -> str:
    """An exception in a part of a line: its class and the first line of what it says."""
    text = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__
