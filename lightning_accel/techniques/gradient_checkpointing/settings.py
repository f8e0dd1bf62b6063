"""The settings of gradient checkpointing."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

from lightning_accel.core.byte_size import parse_bytes
from lightning_accel.core.options import Options, Rule

CheckpointingMode = Literal["off", "full", "selective"]
Budget = (
    Literal["off"]
    | Annotated[int | float | str, Rule("an amount such as '12GiB' or '40%'", partial(parse_bytes, fractions=True))]
)


@dataclass(frozen=True, kw_only=True, repr=False)
class CheckpointingOptions(Options, owner="memory.checkpoint"):
    """What ``MemoryOptions(checkpoint=, blocks=)`` comes to."""

    mode: CheckpointingMode = "off"
    blocks: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, repr=False)
class MemoryBudgetOptions(Options, owner="memory.budget"):
    """What ``MemoryOptions(budget=, blocks=)`` comes to."""

    budget: Budget = "off"
    blocks: tuple[str, ...] = ()
