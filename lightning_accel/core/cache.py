"""The folder in which runs keep what later ones begin with. Needs no torch."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def folder() -> Path:
    """``$LIGHTNING_ACCEL_CACHE``, by default ``$XDG_CACHE_HOME/lightning-accel`` or ``~/.cache/lightning-accel``."""
    if given := os.environ.get("LIGHTNING_ACCEL_CACHE"):
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "lightning-accel"


def xla_programs() -> Path:
    """The folder within it of the programs that XLA has compiled, one within that for each process of a run."""
    return folder().absolute() / "xla"


def digest(about: object) -> str:
    """The name of a file for what is kept about something, which is told from all else by its ``repr``."""
    return hashlib.sha256(repr(about).encode()).hexdigest()[:16]


def size_bytes(within: Path) -> int:
    """How much is kept in a folder; nothing where there is none."""
    return sum(path.stat().st_size for path in within.rglob("*") if path.is_file())
