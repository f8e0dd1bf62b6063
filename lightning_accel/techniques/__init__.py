"""The techniques, and what is needed to write another: see CONTRIBUTING.md."""

from lightning_accel.core.options import Options, Rule
from lightning_accel.core.patch import AttributePatch, MethodPatch, Patch
from lightning_accel.techniques.base import BuildContext, Refusal, Technique
from lightning_accel.techniques.notes import Notes, Verdict
from lightning_accel.techniques.registry import register

__all__ = [
    "AttributePatch",
    "BuildContext",
    "MethodPatch",
    "Notes",
    "Options",
    "Patch",
    "Refusal",
    "Rule",
    "Technique",
    "Verdict",
    "register",
]
