"""How fast a machine runs Python is measured, once in a process, and by what the processor did."""

from __future__ import annotations

import pytest

from lightning_accel.core import clocks
from lightning_accel.experiment.python_pace import python_pace


def test_it_is_measured_once_in_a_process() -> None:
    python_pace.cache_clear()
    assert python_pace() > 0
    assert python_pace() == python_pace()
    assert python_pace.cache_info().misses == 1


def test_a_process_that_has_to_wait_for_a_processor_is_no_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that starts beside others."""
    python_pace.cache_clear()
    counts = iter(range(1_000_000))
    monkeypatch.setattr(clocks, "perf_counter", lambda: 1e6 * next(counts))
    assert python_pace() < 1e6
