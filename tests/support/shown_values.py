"""The values, beside the default, that docs/hosts.md and the tests of all techniques go through."""

from __future__ import annotations

from typing import Any

from lightning_accel.core.options import choices_of
from lightning_accel.techniques.registry import Declaration

_SOME = {
    "preprocess": (),
    "precision": ("16-mixed", "bf16-mixed"),
    "float8": ("tensorwise", "rowwise"),
    "memory_format": (),
    "memory_budget": ("12GiB",),
    "padding": (64,),
    "loader": (),
    "threads": (1,),
    "graphs": ("on",),
    "compile": ("on",),
    "optimizer": ("fused", "foreach"),
}


def shown_values(declaration: Declaration) -> tuple[Any, ...]:
    """Those of a technique; where the table has none, every choice that is neither the default nor off."""
    default = declaration.switch(declaration.default)
    choices = (one for one in choices_of(declaration.switch_type) if one not in (default, declaration.off, "auto"))
    return _SOME[declaration.name] if declaration.name in _SOME else tuple(choices) or _packs(declaration)


def _packs(declaration: Declaration) -> tuple[Any, ...]:
    """``"auto"`` where there is nothing else to ask for."""
    return () if declaration.is_off("auto") or declaration.switch(declaration.default) == "auto" else ("auto",)
