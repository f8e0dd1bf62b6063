"""Live trials of two CPU processes; what each rank saw goes to ``<run>.<rank>.json``.

Run by a test in a process of its own: python live_ranks.py FOLDER
"""

from __future__ import annotations

import functools
import json
import logging
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from support.live_runs import Timed, batches, fit, simulated
from support.strategies.forks import in_ranks

RUNS = {  # how much faster a step is on each rank while the arm is on, and how many batches there are
    "too short": ((0.5, 0.5), 40),  # first, when nothing is remembered
    "faster on both": ((1.5, 1.4), 200),
    "faster on one": ((1.5, 0.8), 200),
}


def run_all(folder: Path, rank: int) -> None:
    for name, (speedups, steps) in RUNS.items():
        with simulated(speedups[rank]) as time:
            model = Timed(time)
            # Each rank has half of the batches.
            plugin = fit(model, loader=batches(2 * steps), devices=2, strategy="ddp")
        outcome = {"seen": model.seen, "status": plugin.report.of("tuning").status}
        (folder / f"{name}.{rank}.json").write_text(json.dumps(outcome), encoding="utf-8")


if __name__ == "__main__":
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    in_ranks(functools.partial(run_all, Path(sys.argv[1])), 2, patience_s=200)
