"""Flash attention: attention of any spelling through fused kernels, found, tried, proven equal, reversible."""

from lightning_accel.techniques.flash_attention.finder import explain
from lightning_accel.techniques.flash_attention.technique import FlashAttention

__all__ = ["FlashAttention", "explain"]
