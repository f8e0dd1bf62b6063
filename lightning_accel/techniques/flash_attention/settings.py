"""The settings of flash attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_accel.core.options import Options

FlashAttentionSetting = Literal[
    "auto", "off", "sdpa", "cudnn", "flash", "efficient", "fa3", "fa4", "flash-attn", "flex"
]


@dataclass(frozen=True, kw_only=True, repr=False)
class FlashAttentionOptions(Options):
    """Flash attention site by site: what ``flash_attention`` takes when a backend is not enough.

    Attributes:
        backend: ``"auto"`` computes attention, however it was written, with a fused kernel wherever a trial finds the
            same numbers and no loss of speed; a backend (``"sdpa"``, ``"cudnn"``, ``"flash"``, ``"efficient"``,
            ``"fa3"``, ``"fa4"``, ``"flash-attn"``, ``"flex"``) wherever the numbers agree; ``"off"`` leaves attention
            alone.
        skip: Class names or module paths of attention, or of what holds it, that stays as it is.
        force: Those that are fused wherever the numbers agree, whatever the clock says.
    """

    backend: FlashAttentionSetting = "auto"
    skip: tuple[str, ...] = ()
    force: tuple[str, ...] = ()
