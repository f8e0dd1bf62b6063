"""How long short calls take: the one place that times what is not a training step."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TypeVar

import torch

from lightning_accel.core.clocks import Stopwatch
from lightning_accel.core.device import synchronize

Name = TypeVar("Name", bound=Hashable)
Prepare = Callable[[], AbstractContextManager[Callable[[], object]]]
"""Prepares a call, and gives the call to time. The context stays open while the call runs."""


def time_calls(calls: Mapping[Name, Prepare], device: torch.device, *, repeats: int = 1) -> Iterator[dict[Name, float]]:
    """Times calls in turns, one round for each result that is asked for: A B, then B A, then A B.

    The device is synchronised before and after what is timed. Who is faster is for the caller to say.

    Args:
        calls: Name → what prepares the call. The preparation is not timed.
        device: Where the calls run.
        repeats: How often a call is run for one time. More than once for calls that are so short that the
            synchronisation counts.

    Yields:
        Name → seconds per call, in the order of ``calls``.
    """
    order = list(calls)
    for _ in itertools.count():
        took = {name: _seconds(calls[name], device, repeats) for name in order}
        yield {name: took[name] for name in calls}
        order.reverse()


def _seconds(prepare: Prepare, device: torch.device, repeats: int) -> float:
    with prepare() as call:
        synchronize(device)
        stopwatch = Stopwatch()
        for _ in range(repeats):
            call()
        synchronize(device)
        return stopwatch.seconds() / repeats
