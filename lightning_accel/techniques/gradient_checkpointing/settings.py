"""The settings of gradient checkpointing."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

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
        budget: The older spelling of ``memory_budget``; it goes in 0.3.
    """

    mode: CheckpointingMode = "full"
    blocks: tuple[str, ...] = ()
    budget: int | float | str | None = field(default=None, metadata={"older": True})

    def __post_init__(self) -> None:
        check_choice("gradient_checkpointing.mode", self.mode, get_args(CheckpointingMode))
        if self.budget is not None:
            parse_bytes("gradient_checkpointing.budget", self.budget, fractions=True)
            warnings.warn(
                f"gradient_checkpointing={{'budget': {self.budget!r}}} is now memory_budget={self.budget!r}; the old"
                " name goes in 0.3.",
                FutureWarning,
                stacklevel=3,
            )
            if self.mode == "selective":
                raise ValueError(
                    f"gradient_checkpointing={{'mode': {self.mode!r}, 'budget': {self.budget!r}}}: a budget plans the"
                    " mode of each block itself. Give one of the two: {'budget': '12GiB'} or {'mode': 'full'}."
                )
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


def budget_moved(value: str | CheckpointingPlan) -> dict[str, Any]:
    """What ``gradient_checkpointing`` with a budget means today."""
    if isinstance(value, str) or value.budget is None:
        return {}
    return {
        "gradient_checkpointing": "off",
        "memory_budget": MemoryBudgetPlan(budget=value.budget, blocks=value.blocks),
    }
