"""Times of short calls. No other code times anything but training steps."""

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
"""Prepares a call, and yields it. The context stays open during the call."""


def time_calls(
    calls: Mapping[Name, Prepare],
    device: torch.device,
    *,
    rounds: int = 1,  # the least number of rounds
    seconds: float = 0.0,  # the least total time
    most_s: float = math.inf,  # no further round begins after this time
    repeats: int = 1,  # calls for each time: more than one if the synchronisation would matter
) -> dict[Name, list[float]]:
    """Times calls in turns, in a random order. Returns name → seconds per call, of each round.

    Each time is taken between two synchronisations of the device. The caller decides who is faster.
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
