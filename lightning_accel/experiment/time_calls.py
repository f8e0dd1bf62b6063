"""How long short calls take: the one place that times what is not a training step."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TypeVar

import torch

from lightning_accel.core.clocks import Stopwatch
from lightning_accel.core.device import synchronize
from lightning_accel.experiment.pair_schedule import Schedule

Name = TypeVar("Name", bound=Hashable)
Prepare = Callable[[], AbstractContextManager[Callable[[], object]]]
"""Prepares a call, and gives the call to time. The context stays open while the call runs."""


def time_calls(calls: Mapping[Name, Prepare], device: torch.device, *, repeats: int = 1) -> Iterator[dict[Name, float]]:
    """Times calls in turns, one round for each result that is asked for, in an order by a coin.

    Each is prepared untimed, and run ``repeats`` times for one time: more than once where it is so short that the
    synchronisation before and after it counts. Yields name → seconds per call. Who is faster is for the caller to ask.
    """
    schedule = Schedule()
    while True:
        took = {name: _seconds(calls[name], device, repeats) for name in schedule.order([*calls])}
        yield {name: took[name] for name in calls}


def least_times(
    calls: Mapping[Name, Prepare], device: torch.device, rounds: int, *, repeats: int = 1, most_s: float = math.inf
) -> dict[Name, float]:
    """The least seconds of each call in so many rounds of :func:`time_calls`, or in ``most_s`` seconds and a round."""
    least, spent_s = dict.fromkeys(calls, math.inf), 0.0
    for took in itertools.islice(time_calls(calls, device, repeats=repeats), rounds):
        least = {name: min(least[name], seconds) for name, seconds in took.items()}
        if (spent_s := spent_s + sum(took.values())) > most_s:
            break
    return least


def _seconds(prepare: Prepare, device: torch.device, repeats: int) -> float:
    with prepare() as call:
        synchronize(device)
        stopwatch = Stopwatch()
        for _ in range(repeats):
            call()
        synchronize(device)
        return stopwatch.seconds() / repeats
