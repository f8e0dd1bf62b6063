"""From trained to served: models with smaller numbers, in forms that need no Python, measured beside each other."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_accel.deploy.comparing import Comparison, Measured, compare
    from lightning_accel.deploy.errors import DynamicDimensionError, ExportError, QuantizeError
    from lightning_accel.deploy.exporting import Exported, export
    from lightning_accel.deploy.int8 import MissingPackageError
    from lightning_accel.deploy.quantizing import Quantized, quantize

_HOMES = {
    "Comparison": "comparing",
    "DynamicDimensionError": "errors",
    "ExportError": "errors",
    "Exported": "exporting",
    "Measured": "comparing",
    "MissingPackageError": "int8",
    "QuantizeError": "errors",
    "Quantized": "quantizing",
    "compare": "comparing",
    "export": "exporting",
    "quantize": "quantizing",
}

__all__ = [
    "Comparison",
    "DynamicDimensionError",
    "ExportError",
    "Exported",
    "Measured",
    "MissingPackageError",
    "QuantizeError",
    "Quantized",
    "compare",
    "export",
    "quantize",
]


def __getattr__(name: str) -> object:
    # Imported when first used: torchmetrics takes seconds, and who loads a form has no need of it.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
