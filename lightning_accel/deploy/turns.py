"""How long calls take, of several forms that take turns: A B C C B A."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lightning_accel.core.clocks import perf_counter
from lightning_accel.core.device import synchronize
from lightning_accel.deploy.inputs import Arguments
from lightning_accel.tuning.pairs import Interval, PairTest

Call = Callable[..., Any]

WARM_UP = 3
LEAST_ROUNDS = 10
SETTLE_S = 0.003
"""So long, and once at least, a form is called untimed in its turn, so that it is measured as where it is served alone:
threads of the library before it still spin for more work, and the caches hold what that one needed."""

_ALPHA = 0.05


@dataclass(frozen=True)
class Latency:
    """What a call takes, in milliseconds.

    Attributes:
        p50: The median.
        p95: The 95th percentile.
        p99: The 99th percentile.
        calls: How many were timed.
    """

    p50: float
    p95: float
    p99: float
    calls: int


def timed(
    calls: Mapping[str, Call], arguments: Arguments, seconds: float, device: torch.device
) -> dict[str, list[float]]:
    """Name → seconds of each round, in which a call of each is timed; rounds begin at either end in turns."""
    args, kwargs = arguments
    spent: dict[str, list[float]] = {name: [] for name in calls}
    with torch.no_grad():
        for call in calls.values():
            for _ in range(WARM_UP):
                call(*args, **kwargs)
        ends, rounds = perf_counter() + seconds, 0
        while rounds < LEAST_ROUNDS or perf_counter() < ends:
            for name in calls if rounds % 2 == 0 else reversed(list(calls)):
                _settle(calls[name], arguments)
                synchronize(device)
                began = perf_counter()
                calls[name](*args, **kwargs)
                synchronize(device)
                spent[name].append(perf_counter() - began)
            rounds += 1
    return spent


def _settle(call: Call, arguments: Arguments) -> None:
    args, kwargs = arguments
    ends = perf_counter() + SETTLE_S
    call(*args, **kwargs)
    while perf_counter() < ends:
        call(*args, **kwargs)


def latency_of(seconds: Sequence[float]) -> Latency:
    """Percentiles of what calls took."""
    p50, p95, p99 = (float(one) for one in 1e3 * np.percentile(seconds, (50, 95, 99)))
    return Latency(p50, p95, p99, len(seconds))


def speedup_of(original: Sequence[float], candidate: Sequence[float]) -> Interval:
    """How many times as fast a candidate is, by pairs of neighbours and the tuner's test."""
    test = PairTest(_ALPHA)
    for pair in zip(original, candidate, strict=True):
        test.add(*pair)
    return test.interval()


def per_second(seconds: Sequence[float], batch_size: int) -> float:
    """Samples, by the median round."""
    return batch_size / statistics.median(seconds)
