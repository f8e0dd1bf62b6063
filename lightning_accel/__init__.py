"""One line makes a PyTorch Lightning run faster and smaller, and proves it.

``Trainer(plugins=[AccelPlugin()])`` or ``Trainer(strategy="accel")`` under Lightning, ``accelerate(model, Plan())`` in
a plain PyTorch loop.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from lightning_accel.strategies.registration import register_strategies

if TYPE_CHECKING:
    from lightning_accel.assembly import accelerate
    from lightning_accel.cli.accel_cli import AccelCLI
    from lightning_accel.core.host import Host
    from lightning_accel.core.report import Report
    from lightning_accel.engine import AccelError, AccelWarning
    from lightning_accel.lightning.plugin import AccelPlugin
    from lightning_accel.memory.schedule import MemoryPlan as MemoryPlan
    from lightning_accel.memory.schedule import MemorySchedule
    from lightning_accel.planning import plan_memory
    from lightning_accel.settings import CheckpointingPlan, FlashAttentionPlan, OffloadingPlan, Plan
    from lightning_accel.strategies.ddp import AccelDDPStrategy
    from lightning_accel.strategies.fsdp import AccelFSDPStrategy
    from lightning_accel.strategies.single_device import AccelStrategy
    from lightning_accel.techniques.flash_attention.multihead import FlashMultiheadAttention

__version__ = "0.1.0"

_HOMES = {
    "AccelCLI": "cli.accel_cli",
    "AccelDDPStrategy": "strategies.ddp",
    "AccelError": "engine",
    "AccelFSDPStrategy": "strategies.fsdp",
    "AccelPlugin": "lightning.plugin",
    "AccelStrategy": "strategies.single_device",
    "AccelWarning": "engine",
    "CheckpointingPlan": "settings",
    "FlashAttentionPlan": "settings",
    "FlashMultiheadAttention": "techniques.flash_attention.multihead",
    "Host": "core.host",
    "MemoryPlan": "memory.schedule",  # the former name of a MemorySchedule
    "MemorySchedule": "memory.schedule",
    "OffloadingPlan": "settings",
    "Plan": "settings",
    "Report": "core.report",
    "accelerate": "assembly",
    "plan_memory": "planning",
}

__all__ = [
    "AccelCLI",
    "AccelDDPStrategy",
    "AccelError",
    "AccelFSDPStrategy",
    "AccelPlugin",
    "AccelStrategy",
    "AccelWarning",
    "CheckpointingPlan",
    "FlashAttentionPlan",
    "FlashMultiheadAttention",
    "Host",
    "MemorySchedule",
    "OffloadingPlan",
    "Plan",
    "Report",
    "accelerate",
    "plan_memory",
]

register_strategies()


def __getattr__(name: str) -> object:
    # Imported when first used: torch and Lightning take seconds, `lightning-accel doctor` should not.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
