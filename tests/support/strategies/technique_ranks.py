"""Trains with each technique alone: with accumulated gradients under DDP, sharded and resumed, and stepped by hand.

Run by a test in a process of its own: python technique_ranks.py FOLDER quick|slow. What a run got is in
``<row>.<rank>.pt``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))

from support.strategies.ranks import Row, run_all
from support.strategies.zoo import VARIANTS
from support.technique_table import alone

ONCE = "one epoch"
ACCUMULATED = {"accumulate_grad_batches": 2}
LARGEST = 1e-5  # tolerance of those that leave the numbers alone but for rounding


class Way(NamedTuple):
    """A way to train, and the plain run in one process that has to give the same numbers."""

    runs: tuple[Row, ...]
    expected: Row


TECHNIQUES = {name: row.settings for name, row in alone().items() if row.tolerance <= LARGEST}


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
    """Left to `make test-slow`: of each technique one setting, and on several ranks, is shown without."""
    name = TECHNIQUES[technique].keys()
    is_first = technique == next(each for each, settings in TECHNIQUES.items() if settings.keys() == name)
    return not is_first or way not in ("accumulated, DDP", "resumed, FSDP2")


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
