"""What kind of card is simulated. The environment chooses, and a test may change it while it runs."""

from __future__ import annotations

import os
from dataclasses import dataclass

_NAMES = {(9, 0): "NVIDIA H100 80GB HBM3", (8, 0): "NVIDIA A100-SXM4-80GB", (7, 5): "Tesla T4"}


@dataclass
class Card:
    """The devices, which are all of one kind.

    Attributes:
        total_bytes: The memory of each.
        capability: Its compute capability.
        count: How many there are, two at most.
    """

    total_bytes: int
    capability: tuple[int, int]
    count: int

    @property
    def name(self) -> str:
        """As a driver says it."""
        return _NAMES.get(self.capability, "NVIDIA simulated")


def _from_environment() -> Card:
    major, minor = os.environ.get("SIMULATED_CUDA_CAPABILITY", "9.0").split(".")
    return Card(
        total_bytes=int(float(os.environ.get("SIMULATED_CUDA_GIB", "80")) * 2**30),
        capability=(int(major), int(minor)),
        count=int(os.environ.get("SIMULATED_CUDA_DEVICES", "1")),
    )


CARD = _from_environment()
