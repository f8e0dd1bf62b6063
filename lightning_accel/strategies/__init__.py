"""The strategies ``accel``, ``accel_ddp`` and ``accel_fsdp``."""

from __future__ import annotations

from importlib import import_module


def __getattr__(name: str) -> object:
    # For YAML that names them here. Imported when first used: torch takes long to import what shards.
    if not name.startswith("Accel"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("lightning_accel"), name)
