"""The strategies ``accel``, ``accel_ddp`` and ``accel_fsdp``."""

from __future__ import annotations

from importlib import import_module


def __getattr__(name: str) -> object:
    # For YAML files that name them here. Imported on first use: torch's sharding modules are slow to import.
    if not name.startswith("Accel"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("lightning_accel"), name)
