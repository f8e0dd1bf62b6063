"""Prepares trained models for serving: quantises them, exports them to forms without Python, compares the forms."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_accel.deploy.comparing import compare_forms as compare_forms
    from lightning_accel.deploy.errors import DynamicDimensionError as DynamicDimensionError
    from lightning_accel.deploy.errors import ExportError as ExportError
    from lightning_accel.deploy.errors import MissingPackageError as MissingPackageError
    from lightning_accel.deploy.errors import QuantizeError as QuantizeError
    from lightning_accel.deploy.exporting import Exported as Exported
    from lightning_accel.deploy.exporting import export as export
    from lightning_accel.deploy.measured_forms import Comparison as Comparison
    from lightning_accel.deploy.measured_forms import Measured as Measured
    from lightning_accel.deploy.quantizing import Quantized as Quantized
    from lightning_accel.deploy.quantizing import quantize as quantize

_HOMES = {
    "compare_forms": "comparing",
    **dict.fromkeys(("Comparison", "Measured"), "measured_forms"),
    **dict.fromkeys(("DynamicDimensionError", "ExportError", "MissingPackageError", "QuantizeError"), "errors"),
    **dict.fromkeys(("Exported", "export"), "exporting"),
    **dict.fromkeys(("Quantized", "quantize"), "quantizing"),
}

__all__ = [*_HOMES]


def __getattr__(name: str) -> object:
    # Imported at first use: torchmetrics takes seconds to import and is not needed to load a form.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
