"""How the benchmarks measure: rounds in which the sides take turns, medians with their intervals, peaks of memory."""

from __future__ import annotations

import os
import statistics
import time
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import psutil
import torch

from lightning_accel.claims.claim import Figure, Target
from lightning_accel.core.host import usable_cores
from lightning_accel.memory.meter import meter_for

_RESAMPLES = 2000
_LEAST_ROUNDS, _MOST_ROUNDS = 7, 301
_LEAST_CALL_MS = 2.0


def device() -> torch.device:
    """Where the rows measure: the GPU where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def interleaved_ms(sides: Mapping[str, Callable[[], Any]], *, rounds: int, warm_up: int = 3) -> dict[str, list[float]]:
    """Milliseconds of every side in every round; the sides take turns, so that the machine's mood hits all alike."""
    names = list(sides)
    spent: dict[str, list[float]] = {name: [] for name in names}
    for round_ in range(warm_up + rounds):
        for name in names if round_ % 2 == 0 else reversed(names):
            milliseconds = _milliseconds(sides[name], calls=1)
            if round_ >= warm_up:
                spent[name].append(milliseconds)
    return spent


def timed_ms(sides: Mapping[str, Callable[[], Any]], *, seconds: float = 3.0) -> dict[str, list[float]]:
    """As :func:`interleaved_ms`, of what takes from microseconds to seconds, in about ``seconds`` in all.

    What is quick is called many times a round, and its milliseconds are those of one call.
    """
    calls = {}
    for name, side in sides.items():
        side()  # the first call builds, allocates, finds its algorithm
        calls[name] = max(1, round(_LEAST_CALL_MS / max(_milliseconds(side, calls=1), 1e-3)))
    spent: dict[str, list[float]] = {name: [] for name in sides}
    end = time.perf_counter() + seconds
    for round_ in range(_MOST_ROUNDS):
        if round_ >= _LEAST_ROUNDS and time.perf_counter() > end:
            break
        for name in sides if round_ % 2 == 0 else reversed(list(sides)):
            spent[name].append(_milliseconds(sides[name], calls=calls[name]))
    return spent


def _milliseconds(side: Callable[[], Any], *, calls: int) -> float:
    _synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        side()
    _synchronize()
    return 1e3 * (time.perf_counter() - start) / calls


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


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
