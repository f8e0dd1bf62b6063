"""Trains with each technique alone: with accumulated gradients under DDP, sharded and resumed, and stepped by hand.

Run by a test in a process of its own: python technique_ranks.py FOLDER quick|slow. What a run got is in
``<row>.<rank>.pt``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))

from lightning_accel.techniques.registry import declarations
from support.strategies.ranks import Row, run_all
from support.strategies.zoo import VARIANTS
from support.technique_table import HOST, alone

ONCE = "one epoch"
ACCUMULATED = {"accumulate_grad_batches": 2}
LARGEST = 1e-5  # tolerance of those that leave the numbers alone but for rounding, and the least of all


class Way(NamedTuple):
    """A way to train, and the plain run in one process that has to give the same numbers."""

    runs: tuple[Row, ...]
    expected: Row


# Without what a card is simulated for: float8 on two ranks is in torchao_ranks.py, and graphs are captured on one.
ROWS = {name: row for name, row in alone().items() if row.host is HOST}
TECHNIQUES = {name: row.settings for name, row in ROWS.items()}


BESIDE_THE_MODEL = (
    *("matmul_precision", "loader", "padding", "threads", "allocator"),
    *("inplace_activations", "sparse_activations"),
)
"""Techniques that change nothing of what ranks share of a model: that it is sharded is nothing to them."""


def tolerance(technique: str) -> float:
    """How far losses may be off, relatively, and weights."""
    return max(ROWS[technique].tolerance, LARGEST)


def ways(technique: str) -> dict[str, Way]:
    """Every way to train with a technique, by its name."""
    shards = {"kind": "transformer", "variant": technique, "strategy": "accel_fsdp", "world_size": 2}
    stopped = Row(**shards, does="stop")
    return {
        "accumulated, DDP": Way(
            (Row(kind="transformer", variant=f"{technique}, accumulated", strategy="accel_ddp", world_size=2),),
            Row(kind="transformer", variant="accumulation"),
        ),
        "convolutions, DDP": Way(
            (Row(kind="cnn", variant=technique, strategy="accel_ddp", world_size=2),), Row(kind="cnn", variant=ONCE)
        ),
        "resumed, FSDP2": Way((stopped, Row(**shards, does="resume", source=stopped)), Row(kind="transformer")),
        "by hand": Way((Row(kind="gan", variant=technique, strategy="accel"),), Row(kind="gan", variant=ONCE)),
    }


def is_slow(technique: str, way: str) -> bool:
    """Left to `make test-slow`: of each technique one setting, where it acts on several ranks, is shown without."""
    name = ROWS[technique].technique
    is_first = technique == next(each for each, row in ROWS.items() if row.technique == name)
    if way == "resumed, FSDP2" and declarations()[name].technique.traits.why_not_sharded:
        return True
    shown = ("accumulated, DDP",) if name in BESIDE_THE_MODEL else ("accumulated, DDP", "resumed, FSDP2")
    return not is_first or way not in shown


def rows(which: str) -> list[Row]:
    """The runs of the techniques in the default suite, or all others, after those that they are compared with."""
    found = [
        way
        for technique in TECHNIQUES
        for name, way in ways(technique).items()
        if is_slow(technique, name) == (which == "slow")
    ]
    return list(dict.fromkeys([way.expected for way in found] + [row for way in found for row in way.runs]))


if __name__ == "__main__":
    VARIANTS[ONCE] = ({}, {})
    for name, settings in TECHNIQUES.items():
        VARIANTS |= {name: ({}, settings), f"{name}, accumulated": (ACCUMULATED, settings)}
    run_all(rows(sys.argv[2]), Path(sys.argv[1]))
