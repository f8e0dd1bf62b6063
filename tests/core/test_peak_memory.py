"""Windows on the most memory held at one time."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch

from lightning_accel.core import peak_memory
from lightning_accel.core.peak_memory import PeakMemory, may_reset_peak

CPU = torch.device("cpu")
MIB = 2**20

needs_reset = pytest.mark.skipif(not may_reset_peak(), reason="this system lets no process reset its high-water mark")


def hold(mib: int) -> None:
    torch.ones(mib * MIB, dtype=torch.uint8)


@needs_reset
def test_a_window_knows_its_own_peak_only() -> None:
    window = PeakMemory(CPU)
    hold(300)
    before = window.peak_bytes()
    window.restart()
    assert window.peak_bytes() < before - 200 * MIB


@needs_reset
def test_another_window_that_begins_takes_nothing_from_the_first() -> None:
    first = PeakMemory(CPU)
    first.restart()
    hold(300)
    peak = first.peak_bytes()
    second = PeakMemory(CPU)
    second.restart()
    assert first.peak_bytes() >= peak
    assert second.peak_bytes() < peak - 200 * MIB


@pytest.mark.parametrize(("one", "other"), [("cuda", "cuda:1"), ("cuda:1", "cuda"), ("cpu", "cpu:0"), ("cpu", "mps")])
def test_two_names_of_the_same_books_do_not_disturb_each_other_either(
    monkeypatch: pytest.MonkeyPatch, one: str, other: str
) -> None:
    books = {"peak": 0}
    for owner, read, reset in (
        (torch.cuda, "max_memory_allocated", "reset_peak_memory_stats"),
        (peak_memory, "_peak_since_reset", "_reset_peak"),
    ):
        monkeypatch.setattr(owner, read, lambda *device: books["peak"])
        monkeypatch.setattr(owner, reset, lambda *device: books.update(peak=0))
    monkeypatch.setattr(peak_memory, "may_reset_peak", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    first, second = (PeakMemory(torch.device(name)) for name in (one, other))
    books["peak"] = 300
    second.restart()
    assert (first.peak_bytes(), second.peak_bytes()) == (300, 0)


def test_a_process_that_may_not_reset_its_mark_says_since_when(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peak_memory, "may_reset_peak", lambda: False)
    window = PeakMemory(CPU)
    window.restart()
    assert not window.can_restart
    assert window.source == "process high-water mark since its start"
    assert window.peak_bytes() > 10 * MIB


@needs_reset
def test_a_process_that_can_open_no_file_any_more_still_knows_its_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    window = PeakMemory(CPU)
    window.restart()

    def refuse(*_: object, **__: object) -> str:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(Path, "read_text", refuse)
    assert window.peak_bytes() > 10 * MIB
