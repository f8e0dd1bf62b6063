"""The strategies ``accel``, ``accel_ddp`` and ``accel_fsdp``."""

from __future__ import annotations

from lightning_accel.strategies.ddp import AccelDDPStrategy
from lightning_accel.strategies.fsdp import AccelFSDPStrategy
from lightning_accel.strategies.single_device import AccelStrategy

__all__ = ["AccelDDPStrategy", "AccelFSDPStrategy", "AccelStrategy"]
