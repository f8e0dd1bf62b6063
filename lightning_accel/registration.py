"""Registration of the strategies by name, as in ``Trainer(strategy="accel")``, with any order of imports.

Lightning has no entry point for strategies and takes seconds to import. ``import lightning_accel`` takes milliseconds,
and registers the names as soon as the program imports a Lightning package.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from typing_extensions import override

from lightning_accel.lightning.packages import LAST_NAMES, PACKAGES, Package, imported

NAMES = {
    "accel": ("AccelStrategy", "One device, with AccelPlugin and the device pipeline"),
    "accel_ddp": ("AccelDDPStrategy", "A copy of the model on each device, with AccelPlugin"),
    "accel_fsdp": ("AccelFSDPStrategy", "Parameters, gradients and optimizer state sharded, with AccelPlugin"),
}


def register_strategies() -> None:
    """Registers the strategy names with each Lightning package: now if the program has imported it, else then."""
    for package in imported():
        _register(package)
    missing = {getattr(one, part): (one, part) for one in PACKAGES for part in LAST_NAMES if not one.is_imported(part)}
    if missing and not any(isinstance(finder, _AtImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AtImport(missing))


def _register(package: Package) -> None:
    registry = package.get("pytorch.strategies", "StrategyRegistry")
    for name, (class_name, description) in NAMES.items():
        registry.register(name, partial(_made, class_name), description, override=True)


def _made(class_name: str, **settings: Any) -> Any:
    return getattr(import_module("lightning_accel"), class_name)(**settings)


class _AtImport(MetaPathFinder):
    """A finder that delegates to the other finders and then watches the import of a Lightning package."""

    def __init__(self, missing: dict[str, tuple[Package, str]]) -> None:
        self._missing = missing

    @override
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._missing:
            return None
        package, part = self._missing[fullname]
        others = (one for one in sys.meta_path if one is not self and hasattr(one, "find_spec"))
        spec = next((found for one in others if (found := one.find_spec(fullname, path, target))), None)
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                del loader.exec_module  # restores the loader's own method
                execute(module)
                self._missing.pop(fullname, None)
                if not self._missing and self in sys.meta_path:
                    sys.meta_path.remove(self)
                imported(part)
                if part == "pytorch":
                    _register(package)

            loader.exec_module = exec_module
        return spec
