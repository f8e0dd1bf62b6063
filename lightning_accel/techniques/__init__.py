"""The techniques, and what is needed to write another: see CONTRIBUTING.md."""

from lightning_accel.core.options import Options, Rule
from lightning_accel.core.patch import AttributePatch, MethodPatch, Patch
from lightning_accel.techniques.arms import Live
from lightning_accel.techniques.base import BuildContext, Technique, Traits
from lightning_accel.techniques.registry import register
from lightning_accel.techniques.site import Site, Variant
from lightning_accel.techniques.technique_context import TechniqueContext, Verdict

__all__ = [
    "AttributePatch",
    "BuildContext",
    "Live",
    "MethodPatch",
    "Options",
    "Patch",
    "Rule",
    "Site",
    "Technique",
    "TechniqueContext",
    "Traits",
    "Variant",
    "Verdict",
    "register",
]
