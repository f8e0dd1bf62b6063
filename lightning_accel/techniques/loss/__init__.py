"""Linear heads and the cross-entropy after them, computed together in pieces."""

from lightning_accel.techniques.loss.technique import Loss

__all__ = ["Loss"]
