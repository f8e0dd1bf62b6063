"""Runs the scenarios on two CPU processes; each rank writes what a scenario returns to ``<scenario>.<rank>.pt``.

Run by a test in a process of its own: python setups.py FOLDER [SCENARIO ...]
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from support.strategies import agreement_scenarios, ddp_scenarios, fsdp_limits, fsdp_scenarios  # noqa: F401  # they register
from support.strategies.forks import in_ranks
from support.strategies.scenarios import SCENARIOS


def main(folder: Path, names: list[str]) -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    in_ranks(lambda rank: run(names or list(SCENARIOS), folder), world_size=2, patience_s=200)


def run(names: list[str], folder: Path) -> None:
    """One after another in the same processes: what fails on every rank alike leaves them able to go on."""
    for name in names:
        said: Any
        try:
            said = SCENARIOS[name]()
        except Exception as error:
            said = {"error": f"{type(error).__name__}: {error}"}
        torch.save(said, folder / f"{name}.{os.environ['RANK']}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
