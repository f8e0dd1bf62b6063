"""Estimates at nearly no cost whether a step may run out of memory."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from lightning_accel.core.peak_memory import PeakMemory
from lightning_accel.core.step_timeline import Driver, StepTimeline, StepTimes
from lightning_accel.memory.oom_report import limit_bytes, own_limits

_TIGHT = 0.7
"""A peak above this share of the memory is too close to the limit for a step without a safety net."""

_FIRST_STEPS = 3
_LOOK_EVERY = 64  # steps
_LATEST = 16  # steps whose times are used


class Pressure:
    """Checks the peak of a device's memory from time to time, and the size of every batch."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._steps = 0
        self._largest = 0
        self._is_tight = device.type not in ("cpu", "cuda") or (device.type == "cpu" and bool(own_limits()))

    def may_run_out(self, given: Any) -> bool:
        """Returns whether the next step, with this input, may need more memory than there is."""
        self._steps += 1
        if self._is_tight:
            return True
        elements = _elements(given)
        is_larger = elements > self._largest
        if is_larger:
            self._largest = elements
        if self._steps % _LOOK_EVERY == _FIRST_STEPS:
            with suppress(OSError):  # without /proc, nobody knows how much there is
                self._is_tight = PeakMemory(self._device).peak_bytes() > _TIGHT * limit_bytes(self._device)
        return is_larger or self._is_tight or self._steps <= _FIRST_STEPS


def _elements(given: Any) -> int:
    """Returns the size of the first tensor of a step's input, as a fast indicator: this runs at every step."""
    while not isinstance(given, Tensor):
        if isinstance(given, Mapping):
            given = [*given.values()]
        if not (isinstance(given, list | tuple) and given):
            return 0
        given = given[0]
    return given.numel()


class Toll:
    """Measures the cost of a remedy for lack of memory: peaks and times of the steps before and after it."""

    def __init__(self, device: torch.device, timeline: StepTimeline) -> None:
        self._peak = PeakMemory(device)
        self._times = deque[float](maxlen=_LATEST)
        self._timeline, self._listens = timeline, False
        self._before_s: float | None = None
        self._before_bytes = 0
        self._left: int | None = None  # steps until the cost is known; None if nobody asks

    def step_begins(self) -> bool:
        """Ends the previous step. Returns whether the cost has become known."""
        if not self._listens:
            self._listens = True
            self._timeline.listeners.append(self._took)
        if self._timeline.claim(self, Driver.MEMORY):
            self._timeline.steps_ended(1)
        if self._left is None:
            return False
        self._left -= 1
        if self._left == _LATEST:  # earlier steps included trials
            self._times.clear()
            self._peak.restart()
        return self._left == 0

    def interrupt(self) -> None:
        """Excludes the time until the next step."""
        self._timeline.pause()

    def close(self) -> None:
        """Stops listening."""
        self._listens = False
        self._timeline.forget(self._took)
        self._timeline.release(self)

    def _took(self, step: StepTimes) -> None:
        self._times.append(step.cycle_ms / 1e3)

    def ask(self, before_bytes: int) -> None:
        """Starts to measure a remedy. Before it, the step needed at least ``before_bytes``."""
        if self._left is None:
            self._before_s = statistics.median(self._times) if len(self._times) >= _FIRST_STEPS else None
            self._before_bytes = before_bytes
        self._left = _LATEST + _FIRST_STEPS
        self._timeline.pause()

    def known(self) -> tuple[int, int | None, float | None] | None:
        """Returns peak before, peak after and the ratio of step times, as far as known; None without :meth:`ask`."""
        if self._left is None:
            return None
        has_after = self._left < _LATEST and len(self._times) > 0
        self._left = None
        after_s = statistics.median(self._times) if has_after else None
        ratio = after_s / self._before_s if after_s is not None and self._before_s else None
        return self._before_bytes, self._peak.peak_bytes() if has_after and self._peak.can_restart else None, ratio
