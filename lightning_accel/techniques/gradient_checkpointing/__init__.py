"""Gradient checkpointing: the same for every block, or planned to fit a memory budget."""

from lightning_accel.techniques.gradient_checkpointing.budget import MemoryBudget
from lightning_accel.techniques.gradient_checkpointing.technique import GradientCheckpointing

__all__ = ["GradientCheckpointing", "MemoryBudget"]
