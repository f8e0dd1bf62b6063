"""What breaks when a torch drops one of the private names of its profilers, in plain words: a test a name."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.autograd import profiler_legacy
from torch.profiler import profile

from lightning_accel.core.torch_private.profilers import before_profilers, stop_legacy_profiler


@pytest.fixture
def events() -> Iterator[list[Any]]:
    """Those of a profiler that is running, once the test has ended it."""
    found: list[Any] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated
        profiler_legacy.profile(profile_memory=True).__enter__()
    yield found
    if not found:
        stop_legacy_profiler()


def test_a_profiler_tells_allocations_in_their_order(events: list[Any]) -> None:
    """Else what a block needs on a CPU could not be measured, and no memory budget could be planned there."""
    del [torch.empty(4096, dtype=torch.uint8)][:]
    events += [event for thread in stop_legacy_profiler() for event in thread]
    sizes = [event.cpu_memory_usage() for event in events if str(event.kind()) == "memory_alloc"]
    assert sizes == [4096, -4096]


def test_a_profiler_is_seen_before_it_starts() -> None:
    """Else a user's profiler would raise in the steps that are metered for a memory budget."""
    told: list[str] = []
    restore = before_profilers(lambda: told.append("one starts"))
    with profile(acc_events=True):  # or torch 2.11 warns that it would not
        assert told == ["one starts"]
    restore()
    with profile(acc_events=True):
        assert told == ["one starts"]
