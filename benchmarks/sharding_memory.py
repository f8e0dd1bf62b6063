"""The memory of a training step on each process, measured and by the formula of `lightning-accel plan`.

    python benchmarks/sharding_memory.py [--json docs/results]

To answer: are parameters, gradients and optimizer states what the formula says, to the byte but for what cannot be
divided evenly, and how far off is the peak? Processes on the CPU, connected by Gloo, train a decoder of four blocks
with AdamW; tests/support/strategies/memory_ranks.py says how they are measured.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from _measure import publish

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from support.strategies import memory_ranks
from support.strategies.memory_ranks import CASES, Case, Measured, expected


def row(case: Case, ranks: list[Measured]) -> list[str]:
    """One run, by its fullest process."""
    fullest, formula = max(ranks, key=lambda rank: rank.peak_bytes), expected(case)
    off = fullest.peak_bytes / formula.peak_bytes - 1
    return [
        case.name,
        *(f"{size / 2**20:.2f}" for size in (fullest.held_bytes, formula.held_bytes)),
        *(f"{size / 2**20:.2f}" for size in (fullest.peak_bytes, formula.peak_bytes)),
        f"{100 * off:+.1f}%",
        formula.fullest.name,
    ]


def main() -> None:
    with TemporaryDirectory() as folder:
        subprocess.run([sys.executable, memory_ranks.__file__, folder], check=True, timeout=600)
        measured = {
            name: [
                Measured(**json.loads(Path(folder, f"{name}.{rank}.json").read_text()))
                for rank in range(case.processes)
            ]
            for name, case in CASES.items()
        }
    publish(
        "sharding_memory",
        "python benchmarks/sharding_memory.py",
        ["strategy, processes", "held, MiB", "formula", "peak of a step, MiB", "formula", "off by", "which moment"],
        [row(CASES[name], ranks) for name, ranks in measured.items()],
        {name: [vars(rank) for rank in ranks] for name, ranks in measured.items()},
    )


if __name__ == "__main__":
    main()
