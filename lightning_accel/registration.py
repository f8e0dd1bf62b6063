"""``Trainer(strategy="accel")`` works whichever of lightning_accel and Lightning is imported first.

Lightning has no entry point by which to learn of strategies, and to import it takes seconds: ``import lightning_accel``
takes milliseconds, and registers the names when a package of Lightning's is there.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from lightning_accel.lightning.packages import Package, at_import, in_order_of

NAMES = {
    "accel": ("AccelStrategy", "One device, with AccelPlugin and the device pipeline"),
    "accel_ddp": ("AccelDDPStrategy", "A copy of the model on each device, with AccelPlugin"),
    "accel_fsdp": ("AccelFSDPStrategy", "Parameters, gradients and optimizer state sharded, with AccelPlugin"),
}


def register_strategies() -> None:
    """Registers the names with each of Lightning's packages that is imported, now or later."""
    at_import(_register)


def _register(package: Package) -> None:
    registry = package.get("pytorch.strategies", "StrategyRegistry")
    for name, (class_name, description) in NAMES.items():
        registry.register(name, _made_when_asked_for(class_name, package), description, override=True)


def _made_when_asked_for(class_name: str, package: Package) -> Callable[..., Any]:
    def make(**settings: Any) -> Any:
        return in_order_of(package, getattr(import_module("lightning_accel"), class_name))(**settings)

    return make
