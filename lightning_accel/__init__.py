"""Faster and smaller PyTorch Lightning runs by one line, with measurements that prove it.

Use ``Trainer(plugins=[AccelPlugin()])`` or ``Trainer(strategy="accel")`` under Lightning, and ``accelerate(model,
Plan())`` in a plain PyTorch loop.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_accel.registration import register_strategies

if TYPE_CHECKING:
    from lightning_accel.arguments import CompileOptions as CompileOptions
    from lightning_accel.arguments import LoaderOptions as LoaderOptions
    from lightning_accel.arguments import MemoryOptions as MemoryOptions
    from lightning_accel.arguments import PrecisionOptions as PrecisionOptions
    from lightning_accel.assembly import AcceleratedModel as AcceleratedModel
    from lightning_accel.assembly import accelerate as accelerate
    from lightning_accel.assembly import plan_memory as plan_memory
    from lightning_accel.cli.accel_cli import AccelCLI as AccelCLI
    from lightning_accel.core.host import Host as Host
    from lightning_accel.core.report import AccelError as AccelError
    from lightning_accel.core.report import AccelWarning as AccelWarning
    from lightning_accel.core.report import Report as Report
    from lightning_accel.lightning.fabric_plugin import AccelFabricPlugin as AccelFabricPlugin
    from lightning_accel.lightning.plugin import AccelPlugin as AccelPlugin
    from lightning_accel.lightning.xla_plugin import AccelXLAPlugin as AccelXLAPlugin
    from lightning_accel.memory.schedule import MemorySchedule as MemorySchedule
    from lightning_accel.search.tune import tune as tune
    from lightning_accel.settings import Plan as Plan
    from lightning_accel.strategies.ddp import AccelDDPStrategy as AccelDDPStrategy
    from lightning_accel.strategies.fsdp import AccelFSDPStrategy as AccelFSDPStrategy
    from lightning_accel.strategies.single_device import AccelStrategy as AccelStrategy
    from lightning_accel.techniques.activation_offloading import OffloadingOptions as OffloadingOptions
    from lightning_accel.techniques.flash_attention.finder import explain as explain
    from lightning_accel.techniques.flash_attention.multihead import FlashMultiheadAttention as FlashMultiheadAttention
    from lightning_accel.techniques.flash_attention.settings import FlashAttentionOptions as FlashAttentionOptions

__version__ = "0.1.0"

_HOMES = {
    "arguments": ("CompileOptions", "LoaderOptions", "MemoryOptions", "PrecisionOptions"),
    "assembly": ("AcceleratedModel", "accelerate", "plan_memory"),
    "cli.accel_cli": ("AccelCLI",),
    "core.host": ("Host",),
    "core.report": ("AccelError", "AccelWarning", "Report"),
    "lightning.fabric_plugin": ("AccelFabricPlugin",),
    "lightning.plugin": ("AccelPlugin",),
    "lightning.xla_plugin": ("AccelXLAPlugin",),
    "memory.schedule": ("MemorySchedule",),
    "search.tune": ("tune",),
    "settings": ("Plan",),
    "strategies.ddp": ("AccelDDPStrategy",),
    "strategies.fsdp": ("AccelFSDPStrategy",),
    "strategies.single_device": ("AccelStrategy",),
    "techniques.activation_offloading": ("OffloadingOptions",),
    "techniques.flash_attention.finder": ("explain",),
    "techniques.flash_attention.multihead": ("FlashMultiheadAttention",),
    "techniques.flash_attention.settings": ("FlashAttentionOptions",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [*_HOME_OF]

if find_spec(f"{__name__}.callbacks") is None:  # a clone keeps the callbacks in another folder
    _CLONE = Path(__file__).parents[1]
    raise ImportError(f"{_CLONE} is a clone that is not installed: pip install {_CLONE}, or leave it off the path.")

register_strategies()


def __getattr__(name: str) -> object:
    # Imports on first use: torch and Lightning take seconds to import, and `lightning-accel doctor` needs neither.
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    if name.endswith("Plugin"):  # Lightning's command line imports plugins by name
        import_module(f"{__name__}.lightning.parser_errors").answer_in_one_line()
    return found
