"""The installed release of this package, for data that is kept per release."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def own_version() -> str:
    """Returns ``"lightning-accel 0.1.0"``, without the number if the package is on the path but not installed."""
    try:
        return f"lightning-accel {version('lightning-accel')}"
    except PackageNotFoundError:
        return "lightning-accel"
