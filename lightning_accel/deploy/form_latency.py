"""Times calls of several forms in turns, in random order."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lightning_accel.core.clocks import Deadline
from lightning_accel.deploy.inputs import Arguments
from lightning_accel.experiment.pair_test import PairTest, RatioInterval
from lightning_accel.experiment.time_calls import time_calls

Call = Callable[..., Any]

WARM_UP = 3
LEAST_ROUNDS = 10
SETTLE_S = 0.003
"""Seconds (and at least one call) for which a form runs untimed in its turn, so that it is timed as if served alone.
Threads of the previous form's library may still spin, and the caches hold that form's data.
"""

_ALPHA = 0.05


@dataclass(frozen=True)
class Latency:
    """The latency of a call, in milliseconds."""

    p50: float  # the median
    p95: float  # the 95th percentile
    p99: float
    calls: int  # how many were timed


def timed(
    calls: Mapping[str, Call], arguments: Arguments, seconds: float, device: torch.device
) -> dict[str, list[float]]:
    """Times calls in turns for ``seconds``, at least ten rounds. Returns name → seconds of the call in each round."""
    bound = {name: functools.partial(call, *arguments[0], **arguments[1]) for name, call in calls.items()}
    with torch.no_grad():
        for call in bound.values():
            for _ in range(WARM_UP):
                call()
        settled = {name: functools.partial(_settled, call) for name, call in bound.items()}
        return time_calls(settled, device, rounds=LEAST_ROUNDS, seconds=seconds)


def _settled(call: Callable[[], Any]) -> AbstractContextManager[Callable[[], Any]]:
    """Runs the call untimed for a while and then returns it for timing."""
    deadline = Deadline(SETTLE_S)
    call()
    while not deadline.is_over():
        call()
    return nullcontext(call)


def latency_of(seconds: Sequence[float]) -> Latency:
    p50, p95, p99 = (float(one) for one in 1e3 * np.percentile(seconds, (50, 95, 99)))
    return Latency(p50, p95, p99, len(seconds))


def speedup_of(original: Sequence[float], candidate: Sequence[float]) -> RatioInterval:
    """Returns the speedup of a candidate, by pairs of neighbouring calls and the tuner's test."""
    test = PairTest(_ALPHA)
    for pair in zip(original, candidate, strict=True):
        test.add(*pair)
    return test.interval()
