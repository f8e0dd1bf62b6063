"""The strategies ``accel``, ``accel_ddp`` and ``accel_fsdp``, and where the package meets Lightning's own."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_accel.strategies.ddp import AccelDDPStrategy
    from lightning_accel.strategies.fsdp import AccelFSDPStrategy
    from lightning_accel.strategies.single_device import AccelStrategy

__all__ = ["AccelDDPStrategy", "AccelFSDPStrategy", "AccelStrategy"]

_HOMES = {"AccelDDPStrategy": "ddp", "AccelFSDPStrategy": "fsdp", "AccelStrategy": "single_device"}


def __getattr__(name: str) -> object:
    # Imported when first used, as in the package's own __init__: registering names must not import Lightning.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
