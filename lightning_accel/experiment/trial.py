"""Trials: compare the original with a candidate on the user's own first input, by numbers and by speed.

A trial leaves no trace in the run: random streams, buffers, gradients and dispatch modes are restored. It calls both
sides repeatedly: use it for torch's own operations on tensors, not for code whose calls may have other effects.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_accel.core.isolation import isolated
from lightning_accel.core.measured import Measurement
from lightning_accel.core.random_streams import same_state
from lightning_accel.core.report import one_line
from lightning_accel.core.states import VerdictKind
from lightning_accel.experiment.screening import PAIRS
from lightning_accel.experiment.time_calls import time_calls
from lightning_accel.experiment.tolerance import APART, FACTOR, Measuring, Spread, deviation, is_batched, other_orders
from lightning_accel.experiment.trial_runs import TooDearError, TrialRuns, TrialSide

_TOO_DEAR = "not tried to its end: it would cost more than this run can pay"


@dataclass(frozen=True, kw_only=True)
class NumbersComparison:
    """The measurements of a trial."""

    failure: str = ""  # the candidate's error, or how its numbers differ; empty if they agree
    cut_short: Literal["", "failed", "too_dear"] = ""  # whether it ended early, with an error or for the purse
    error: float = 0.0  # the candidate's largest relative error, against the oracle if one was computed
    original_ms: float | None = None  # the least milliseconds of the original, forward and backward; None if untimed
    candidate_ms: float | None = None  # the candidate's
    left_behind: tuple[str, ...] = ()  # buffers, attributes and inputs that forward changed (and the trial restored)
    spread: Spread | None = None  # the allowed error, as far as it had to be measured
    is_same: bool | None = None  # whether the candidate's numbers equal the original's bitwise; None if not compared

    @property
    def kind(self) -> VerdictKind:
        """Returns the kind of verdict that the numbers give."""
        return self.cut_short or ("refused" if self.failure else "kept")

    def measured(self) -> Measurement:
        """Returns the figures of numbers and times."""
        return Measurement(
            error=None if self.spread is None else self.error,
            spread=None if self.spread is None else self.spread.allowed.noise / FACTOR,
            is_same=self.is_same,
            original_ms=self.original_ms,
            candidate_ms=self.candidate_ms,
        )


class Trial(TrialRuns):
    """Compares a candidate with the original: by numbers, and by a few times."""

    def numbers(self, original: TrialSide, candidate: TrialSide, *, in_other_orders: bool = True) -> NumbersComparison:
        """Compares outputs and, ``with_gradients``, the gradients of inputs and parameters.

        The oracle is the original in float64, without autocast, on a few samples. The errors of the original against
        it, in several orders of its sums, are the allowed error of the candidate (:class:`.Measuring`), on the whole
        batch too. Without an oracle, the original's own result takes its place. Dropout is off for the few samples and
        on for the whole batch: the draws, and the elements that they belong to, must be the same.

        With ``in_other_orders=False``, for a candidate that runs the original's operations in the same order, both are
        called once, on ``samples`` of the batch, with the same random numbers.
        """
        compared = self._by_spread if in_other_orders else self._by_rounding
        found, left_behind = self._ended(lambda: compared(original, candidate))
        if self._passes.writes_to_input:
            left_behind.append("its input")
        return replace(found, left_behind=(*left_behind, *sorted(self._drawn)))

    def rehearse(self, side: TrialSide) -> NumbersComparison:
        """Runs one side once, forward and backward, so that work of its first call is done."""
        return self._timed(1, {"candidate": side})

    def time(self, original: TrialSide, candidate: TrialSide) -> NumbersComparison:
        """Times both, forward and backward, a few times in turns."""
        return self._timed(PAIRS, {"original": original, "candidate": candidate})

    def _timed(self, rounds: int, sides: dict[str, TrialSide]) -> NumbersComparison:
        def timed() -> NumbersComparison:
            calls = {name: functools.partial(self._ready, side) for name, side in sides.items()}
            seconds = time_calls(calls, self._device, rounds=rounds)
            ms = {name: 1e3 * min(each) for name, each in seconds.items()}
            return NumbersComparison(original_ms=ms.get("original"), candidate_ms=ms["candidate"])

        return self._ended(timed)[0]

    def _ended(self, tried: Callable[[], NumbersComparison]) -> tuple[NumbersComparison, list[str]]:
        """Runs a trial and catches its errors. Returns the result, and what the trial found changed."""
        left_behind: list[str] = []
        self._unpaid.lap()
        try:
            with isolated(self.module, self._device) as left_behind:
                found = tried()
        except TooDearError:
            found = NumbersComparison(failure=_TOO_DEAR, cut_short="too_dear")
        except Exception as error:
            found = NumbersComparison(failure=f"failed in its trial: {one_line(error)}", cut_short="failed")
        self._pay()
        return found, left_behind

    @contextmanager
    def _ready(self, side: TrialSide) -> Iterator[Callable[[], object]]:
        """Prepares a pass of one side to be timed.

        Raises:
            TooDearError: The purse cannot pay for it.
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
            size = self._batch_size if args is self.args else self.samples or 0
            orders = other_orders(original.call, size, self._device, new_kernels=not self.keeps_kernels)
            reordered = ((TrialSide(call, original.state), setting) for call, setting in orders)
            measuring = Measuring(
                expected,
                self._coarsest(actual),
                lambda: self._oracle(original, args, kwargs),
                self._computed(reordered, args, kwargs),
                self.alike,
                self._computed(((formula, nullcontext()) for formula in self.formulas), args, kwargs),
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

    def _both(
        self, original: TrialSide, candidate: TrialSide, args: Any, kwargs: Any
    ) -> tuple[list[Tensor], list[Tensor], str]:
        """Returns the results of both sides, and how the candidate differs apart from its numbers."""
        expected, before = self._once(original, args, kwargs)
        actual, after = self._once(candidate, args, kwargs)
        if not all(map(same_state, before, after)):
            return expected, actual, "draws another amount of random numbers than the original"
        outputs = zip(expected, actual[: self._passes.num_outputs], strict=False)
        is_free = candidate.arguments is not None or not self.keeps_strides
        is_alike = is_free or all(itertools.starmap(_lie_alike, outputs))
        return expected, actual, "" if is_alike else "its results lie otherwise in memory than the original's"

    def _judge(self, measuring: Measuring, expected: list[Tensor], actual: list[Tensor]) -> NumbersComparison:
        if [t.shape for t in actual] != [t.shape for t in expected]:
            return NumbersComparison(failure="returns tensors of other shapes than the original")
        if not expected:
            return NumbersComparison(failure="returns no tensors that could be compared with the original's")
        found, failure = measuring.judged(actual)
        is_same = all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(expected, actual, strict=True))
        return NumbersComparison(failure=failure, error=found.noise, spread=measuring.spread, is_same=is_same)

    def _objection(self, measuring: Measuring, expected: list[Tensor], actual: list[Tensor]) -> str:
        """Describes an error on the whole batch, after a few samples were correct; empty if there is none."""
        if [t.shape for t in actual] != [t.shape for t in expected]:
            return "returns tensors of other shapes than the original for the whole batch"
        # The error of a sum over more samples is larger, as that of a random walk.
        walked = (self._batch_size / (self.samples or self._batch_size)) ** 0.5
        pairs = list(zip(actual, expected, strict=True))
        for of_samples, times in ((True, APART), (False, APART * walked)):
            chosen = [pair for pair in pairs if is_batched(pair[1], self._batch_size) is of_samples]
            objection = measuring.objection(deviation(*zip(*chosen, strict=True)), times) if chosen else ""
            if objection:
                return f"on the whole batch, {objection}"
        return ""


def _lie_alike(one: Tensor, other: Tensor) -> bool:
    """Returns whether two tensors of one shape have the same strides in all dimensions with several elements."""
    strides = zip(one.shape, one.stride(), other.stride(), strict=False)
    return not one.numel() or all(size == 1 or first == second for size, first, second in strides)
