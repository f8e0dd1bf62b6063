"""From trained to served: models with smaller numbers, in forms that need no Python, measured beside each other."""

from lightning_accel.deploy.errors import DynamicDimensionError, ExportError
from lightning_accel.deploy.export import Exported, export
from lightning_accel.deploy.int8 import MissingPackageError
from lightning_accel.deploy.quantize import Quantized, quantize

__all__ = [
    "DynamicDimensionError",
    "ExportError",
    "Exported",
    "MissingPackageError",
    "Quantized",
    "export",
    "quantize",
]
