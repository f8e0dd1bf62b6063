"""Reads facts about the processor on Linux. Needs no torch."""

from __future__ import annotations

from pathlib import Path


def from_cpuinfo(key: str) -> str | None:
    """Returns a field of the first processor in ``/proc/cpuinfo``; None on other systems or if it is missing."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), None)
