"""Vocabulary sizes for which a GPU's matrix products are fast."""

from __future__ import annotations

from lightning_accel.core.host import Host

_LIKED = 64  # NVIDIA, Matrix multiplication background: 128 bytes, whatever the card
_LEAST = 1000


def why_unlucky(size: int, host: Host) -> str:
    """Returns a remark on a layer of width ``size``, such as a vocabulary's, that is slow on ``host``; else empty."""
    if host.kind not in ("cuda", "rocm") or size < _LEAST or not size % _LIKED:
        return ""
    return (
        f"a vocabulary of {size:,}: products with {-(-size // _LIKED) * _LIKED:,} rows, a multiple of {_LIKED}, are"
        " faster on this device. Its size is yours to change, before training"
    )
