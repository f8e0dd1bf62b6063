"""The techniques, and what is needed to write another: see CONTRIBUTING.md."""

from lightning_accel.core.patch import AttributePatch, MethodPatch, Patch
from lightning_accel.techniques.base import Refusal, Surroundings, Technique
from lightning_accel.techniques.notes import Notes, Verdict
from lightning_accel.techniques.registry import register

__all__ = [
    "AttributePatch",
    "MethodPatch",
    "Notes",
    "Patch",
    "Refusal",
    "Surroundings",
    "Technique",
    "Verdict",
    "register",
]
