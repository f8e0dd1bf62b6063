"""The settings of gradient checkpointing."""

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
            (``selective`` takes the other parts that hold several layers too).
    """

    mode: CheckpointingMode = "full"
    blocks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_choice("gradient_checkpointing.mode", self.mode, get_args(CheckpointingMode))
        object.__setattr__(self, "blocks", names_given("gradient_checkpointing.blocks", self.blocks))


@dataclass(frozen=True, kw_only=True)
class MemoryBudgetPlan:
    """A memory budget with the blocks named: what ``memory_budget`` takes when an amount is not enough.

    Attributes:
        budget: The most memory that a training step may need, everything included: bytes, text such as ``"12GiB"``, or
            a fraction of the device. What each block does for it, keep its activations, recompute or offload them, is
            planned from what the first steps measure; ``"off"``: there is no limit.
        blocks: Class names or module paths of the blocks; empty: the model's repeated blocks and the other parts that
            hold several layers, found by themselves.
    """

    budget: int | float | str = "off"
    blocks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.budget != "off":
            parse_bytes("memory_budget", self.budget, fractions=True)
        object.__setattr__(self, "blocks", names_given("memory_budget.blocks", self.blocks))
