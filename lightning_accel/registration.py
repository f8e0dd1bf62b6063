"""An import hook: to import Lightning takes 10 s, and it has no entry point by which to learn of strategies.

``import lightning_accel`` takes milliseconds, and ``Trainer(strategy="accel")`` works whichever of the two is imported
first. Where Lightning is there already, the names are registered at once. Else a finder waits for one import, that of
the module in which the Trainer looks strategies up, registers, and is gone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any

from typing_extensions import override

NAMES = {
    "accel": ("AccelStrategy", "One device, with AccelPlugin and the device pipeline"),
    "accel_ddp": ("AccelDDPStrategy", "A copy of the model on each device, with AccelPlugin"),
    "accel_fsdp": ("AccelFSDPStrategy", "Parameters, gradients and optimizer state sharded, with AccelPlugin"),
}
_LOOKS_NAMES_UP = "lightning.pytorch.trainer.connectors.accelerator_connector"


def register_strategies() -> None:
    """Registers the names now if Lightning is imported, else at the moment when it is."""
    if _LOOKS_NAMES_UP in sys.modules:
        _register()
    else:
        sys.meta_path.insert(0, _AtImport())


def _register() -> None:
    registry = import_module("lightning.pytorch.strategies").StrategyRegistry
    for name, (class_name, description) in NAMES.items():
        registry.register(name, _made_when_asked_for(class_name), description, override=True)


def _made_when_asked_for(class_name: str) -> Callable[..., Any]:
    def make(**settings: Any) -> Any:
        return getattr(import_module("lightning_accel"), class_name)(**settings)

    return make


class _AtImport(MetaPathFinder):
    """Finds nothing itself: the module that is looked for imports the registry next anyway."""

    @override
    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if fullname == _LOOKS_NAMES_UP and self in sys.meta_path:
            sys.meta_path.remove(self)
            _register()
