"""Makes ``Trainer(strategy="accel")`` and its kin known to Lightning, without importing Lightning for it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from typing_extensions import override

NAMES = {
    "accel": ("AccelStrategy", "One device, with AccelPlugin and the device pipeline"),
    "accel_ddp": ("AccelDDPStrategy", "A copy of the model on each device, with AccelPlugin"),
    "accel_fsdp": ("AccelFSDPStrategy", "Parameters, gradients and optimizer state sharded, with AccelPlugin"),
}
_REGISTRY_HOME = "lightning.pytorch.strategies"


def register_strategies() -> None:
    """Registers the names now if Lightning is imported, else at the moment when it is."""
    if home := sys.modules.get(_REGISTRY_HOME):
        _register(home)
    else:
        sys.meta_path.insert(0, _AtImport())


def _register(home: ModuleType) -> None:
    for name, (class_name, description) in NAMES.items():
        home.StrategyRegistry.register(name, _made_when_asked_for(class_name), description, override=True)


def _made_when_asked_for(class_name: str) -> Callable[..., Any]:
    def make(**settings: Any) -> Any:
        from lightning_accel import strategies

        return getattr(strategies, class_name)(**settings)

    return make


class _AtImport(MetaPathFinder):
    """Waits for one import of Lightning's strategies, and leaves then."""

    @override
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _REGISTRY_HOME:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _RegisteringLoader(spec.loader)
        return spec


class _RegisteringLoader(Loader):
    """Loads a module as ``inner`` does, gives it its place back, and registers."""

    def __init__(self, inner: Loader) -> None:
        self.inner = inner

    @override
    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.inner.create_module(spec)

    @override
    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self.inner
        if module.__spec__ is not None:
            module.__spec__.loader = self.inner
        self.inner.exec_module(module)
        _register(module)
