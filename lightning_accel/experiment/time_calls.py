"""How long short calls take: the one place that times what is not a training step."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager
from typing import TypeVar

import torch

from lightning_accel.core.clocks import Deadline, Stopwatch
from lightning_accel.core.device import synchronize
from lightning_accel.experiment.pair_schedule import Schedule

Name = TypeVar("Name", bound=Hashable)
Prepare = Callable[[], AbstractContextManager[Callable[[], object]]]
"""Prepares a call, and gives the call to time. The context stays open while the call runs."""


def time_calls(
    calls: Mapping[Name, Prepare],
    device: torch.device,
    *,
    rounds: int = 1,  # at least
    seconds: float = 0.0,  # that they go on for, at least
    most_s: float = math.inf,  # after which no further round begins
    repeats: int = 1,  # of a call, for one time: more than one where the synchronisation counts
) -> dict[Name, list[float]]:
    """Times calls in turns, in an order by a coin. Returns name → seconds per call, of each round.

    What is timed is between two synchronisations of the device; who is faster is for the caller to ask.
    """
    schedule, least, most = Schedule(), Deadline(seconds), Deadline(most_s)
    took: dict[Name, list[float]] = {name: [] for name in calls}
    for count in itertools.count(1):
        for name in schedule.order([*calls]):
            took[name].append(_seconds(calls[name], device, repeats))
        if most.is_over() or (count >= rounds and least.is_over()):
            break
    return took


def _seconds(prepare: Prepare, device: torch.device, repeats: int) -> float:
    with prepare() as call:
        synchronize(device)
        stopwatch = Stopwatch()
        for _ in range(repeats):
            call()
        synchronize(device)
        return stopwatch.seconds() / repeats
