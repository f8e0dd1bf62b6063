"""A backend that computes as torch does, and shows what it was given."""

from __future__ import annotations

from torch import Tensor
from typing_extensions import override

from lightning_accel.techniques.flash_attention.backends import Sdpa
from lightning_accel.techniques.flash_attention.call import AttentionCall


class Recorder(Sdpa):
    """Remembers what it was called with."""

    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []

    @override
    def __call__(self, call: AttentionCall) -> Tensor:
        self.calls.append(call)
        return super().__call__(call)
