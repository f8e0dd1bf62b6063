"""What Linux says of this machine's processor. Needs no torch."""

from __future__ import annotations

from pathlib import Path


def from_cpuinfo(key: str) -> str | None:
    """What Linux says of the first processor; None where it is another system, or says nothing."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), None)
