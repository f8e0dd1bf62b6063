"""What ``gradient_checkpointing`` takes when a mode is not enough."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from lightning_accel.core.byte_size import parse_bytes
from lightning_accel.core.checks import check_choice, names_given

CheckpointingMode = Literal["off", "full", "selective"]


@dataclass(frozen=True, kw_only=True)
class CheckpointingPlan:
    """Gradient checkpointing with the blocks named: what ``gradient_checkpointing`` takes when a mode is not enough.

    Attributes:
        mode: ``"full"`` recomputes a whole block in the backward pass; ``"selective"`` keeps what matrix products,
            convolutions and attention computed and recomputes the rest; ``"off"`` does nothing.
        blocks: Class names or module paths of the blocks; empty: the model's repeated blocks, found by themselves
            (``selective`` and a budget take the other parts that hold several layers too).
        budget: The most memory that a training step may need, everything included: bytes, text such as ``"12GiB"``,
            or a fraction of the device. What each block does is then planned, and ``mode`` has no say.
    """

    mode: CheckpointingMode = "full"
    blocks: tuple[str, ...] = ()
    budget: int | float | str | None = None

    def __post_init__(self) -> None:
        check_choice("gradient_checkpointing.mode", self.mode, get_args(CheckpointingMode))
        if self.budget is not None:
            parse_bytes("gradient_checkpointing.budget", self.budget, fractions=True)
        object.__setattr__(self, "blocks", names_given("gradient_checkpointing.blocks", self.blocks))
