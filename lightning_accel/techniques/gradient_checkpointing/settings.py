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
    """What ``MemoryOptions(checkpoint=, blocks=)`` comes to.

    Attributes:
        mode: ``"full"`` recomputes a whole block in the backward pass; ``"selective"`` keeps what matrix products,
            convolutions and attention computed and recomputes the rest; ``"off"`` does nothing.
        blocks: Class names or module paths of the blocks; empty: the model's repeated blocks, found by themselves
            (``selective`` takes the other parts that hold several layers too).
    """

    mode: CheckpointingMode = "off"
    blocks: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, repr=False)
class MemoryBudgetOptions(Options, owner="memory.budget"):
    """What ``MemoryOptions(budget=, blocks=)`` comes to.

    Attributes:
        budget: The most memory that a training step may need, everything included: ``"12GiB"``, or a share of the
            device, ``"40%"``. What each block does for it, keep its activations, recompute or offload them, is
            planned from what the first steps measure; ``"off"``: there is no limit.
        blocks: Class names or module paths of the blocks; empty: the model's repeated blocks and the other parts that
            hold several layers, found by themselves.
    """

    budget: Budget = "off"
    blocks: tuple[str, ...] = ()
