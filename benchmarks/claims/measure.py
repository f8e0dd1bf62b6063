"""How the benchmarks measure: rounds in which the sides take turns, medians with their intervals, peaks of memory."""

from __future__ import annotations

import functools
import os
import statistics
import time
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from lightning_accel.assembly import AcceleratedModel
from lightning_accel.claims.claim import Figure, Target
from lightning_accel.core.host import usable_cores
from lightning_accel.experiment.time_calls import Prepare, time_calls
from lightning_accel.memory.meter import meter_for

_RESAMPLES = 2000
_LEAST_ROUNDS = 7
_LEAST_CALL_S = 0.002

NOTHING_ELSE: dict[str, Any] = {"memory_format": "off", "inplace_activations": False, "flash_attention": "off"}
"""The techniques that a plan has by itself, switched off: of a row that measures another, or one of them alone."""


def device() -> torch.device:
    """Where the rows measure: the GPU where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def interleaved_ms(sides: Mapping[str, Callable[[], Any]], *, rounds: int, warm_up: int = 3) -> dict[str, list[float]]:
    """Milliseconds of every side in every round; the sides take turns, so that the machine's mood hits all alike."""
    taken = time_calls(_prepared(sides), device(), rounds=warm_up + rounds)
    return {name: [1e3 * each for each in seconds[warm_up:]] for name, seconds in taken.items()}


def timed_ms(sides: Mapping[str, Callable[[], Any]], *, seconds: float = 3.0) -> dict[str, list[float]]:
    """As :func:`interleaved_ms`, of what takes from microseconds to seconds, in about ``seconds`` in all.

    What is quick is called many times a round, and its milliseconds are those of one call.
    """
    for side in sides.values():
        side()  # the first call builds, allocates, finds its algorithm
    once = time_calls(_prepared(sides), device())
    calls = {name: max(1, round(_LEAST_CALL_S / max(taken, 1e-6))) for name, (taken,) in once.items()}
    repeated = {name: functools.partial(_repeat, side, calls[name]) for name, side in sides.items()}
    spent = time_calls(_prepared(repeated), device(), rounds=_LEAST_ROUNDS, seconds=seconds)
    return {name: [1e3 * each / calls[name] for each in taken] for name, taken in spent.items()}


def _prepared(sides: Mapping[str, Callable[[], Any]]) -> dict[str, Prepare]:
    def prepare(side: Callable[[], Any]) -> AbstractContextManager[Callable[[], object]]:
        return nullcontext(side)

    return {name: functools.partial(prepare, side) for name, side in sides.items()}


def _repeat(side: Callable[[], Any], calls: int) -> None:
    for _ in range(calls):
        side()


def without_gradients(call: Callable[..., Any], *inputs: Tensor) -> Callable[[], Any]:
    """A call of a model on these inputs."""

    def run() -> Any:
        with torch.no_grad():
            return call(*inputs)

    return run


def train_step(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    handle: AcceleratedModel | None,
    optimizer: Optimizer | None = None,
) -> Tensor:
    """A training step of a classifier, with its handle where it is accelerated; no gradient is left.

    Returns:
        The loss.
    """
    with nullcontext() if handle is None else handle.step():
        loss = F.cross_entropy(model(images if handle is None else handle.batch(images)), labels)
    loss.backward()
    if optimizer is not None:
        optimizer.step()
    model.zero_grad()
    return loss


def speedup(condition: str, slow: Sequence[float], fast: Sequence[float], target: Target | None = None) -> Figure:
    """How many times as long ``slow`` takes as ``fast``: the median over paired rounds, with its interval.

    Args:
        condition: As of a figure.
        slow: Milliseconds in every round of what is given up.
        fast: Of what is put in its place.
        target: What is claimed.
    """
    value, low, high = median_interval([a / b for a, b in zip(slow, fast, strict=True)])
    note = f"{_ms(statistics.median(slow))} to {_ms(statistics.median(fast))}"
    return Figure(condition=condition, value=value, low=low, high=high, target=target, note=note)


def _ms(milliseconds: float) -> str:
    return f"{1e3 * milliseconds:.3g} µs" if milliseconds < 1 else f"{milliseconds:.3g} ms"


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The median and the ends of its 95% interval, by resampling.

    Efron, "Bootstrap methods: another look at the jackknife" (1979), https://doi.org/10.1214/aos/1176344552; the
    percentiles of the resampled medians. The same values give the same interval.
    """
    sample = np.asarray(values, np.float64)
    drawn = np.random.default_rng(0).choice(sample, (_RESAMPLES, len(sample)))
    low, high = np.percentile(np.median(drawn, axis=1), [2.5, 97.5])
    return float(np.median(sample)), float(low), float(high)


def median_ratio(numerator: Sequence[float], denominator: Sequence[float]) -> float:
    """The median of the ratios of paired rounds."""
    return statistics.median(a / b for a, b in zip(numerator, denominator, strict=True))


def peak_step_bytes(step: Callable[[], Any]) -> int:
    """The most bytes of tensors that ``step`` had allocated at one time beyond what it started with."""
    meter = meter_for(device())
    meter.start()
    try:
        step()
        intervals = meter.stop()
    except BaseException:
        meter.abort()
        raise
    return max(interval.peak_bytes for interval in intervals) - intervals[0].level_bytes


def peak_bytes(call: Callable[[], Any]) -> int:
    """The most that ``call`` had allocated, by torch and by NumPy, each at its own peak: at least what it was."""
    tracemalloc.start()
    try:
        call()
        _, of_numpy = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return peak_step_bytes(call) + of_numpy


class Others:
    """How busy other processes keep this machine, from the making of this to :meth:`cores`."""

    def __init__(self) -> None:
        self._started = time.perf_counter(), _busy_seconds()

    def cores(self) -> float:
        """How many cores they took on average; 0 where this process may use some of the cores only, and cannot tell."""
        start, busy = self._started
        if usable_cores() != os.cpu_count():
            return 0.0
        return max(0.0, (_busy_seconds() - busy) / (time.perf_counter() - start))


def _busy_seconds() -> float:
    """What all cores have computed for others than this process and its children."""
    everybody, own = psutil.cpu_times(), psutil.Process().cpu_times()
    busy = sum(everybody) - everybody.idle - getattr(everybody, "iowait", 0.0)
    # Linux counts guests as users, too.
    busy -= getattr(everybody, "guest", 0.0) + getattr(everybody, "guest_nice", 0.0)
    return float(busy - own.user - own.system - own.children_user - own.children_system)
