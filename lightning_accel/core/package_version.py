"""Which release of the package this is, for what is kept by release."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def own_version() -> str:
    """``"lightning-accel 0.1.0"``; without the number where the package is on the path and was never installed."""
    try:
        return f"lightning-accel {version('lightning-accel')}"
    except PackageNotFoundError:
        return "lightning-accel"
