"""Live trials of two CPU processes; what each rank saw goes to ``<run>.<rank>.json``.

Run by a test in a process of its own: python live_ranks.py FOLDER
"""

from __future__ import annotations

import functools
import json
import logging
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from lightning_accel.lightning import start_rules
from support.live_runs import Speed, Timed, batches, fit, simulated
from support.strategies.forks import in_ranks

RUNS = {  # how much faster a step is on each rank while the arm is on, and how many batches there are
    "too short": ((0.5, 0.5), 40),  # first, when nothing is remembered
    "faster on both": ((1.5, 1.4), 200),
    "faster on one": ((1.5, 0.8), 200),
}
SHORT_ON_RANKS = start_rules.SHORT_ON_RANKS  # a fork of the tests has none
LIMITED: dict[str, tuple[int, dict[str, Any]]] = {  # by the Trainer: batches of each rank's loader, and settings
    "known to be short": (20, {"max_steps": 20}),
    "known to be short, and uneven": (20, {"limit_train_batches": 12, "max_epochs": 2}),
    "not known to be short": (20, {}),
    "asked for by name": (20, {"max_steps": 20, "accel": {"threads": 1}}),
}


def run_all(folder: Path, rank: int) -> None:
    run_limited(folder, rank)
    for name, (speedups, steps) in RUNS.items():
        with simulated(speedups[rank]) as time:
            model = Timed(time)
            # Each rank has half of the batches.
            plugin = fit(model, loader=batches(2 * steps), devices=2, strategy="ddp")
        outcome = {"seen": model.seen, "status": plugin.report.of("tuning").status}
        (folder / f"{name}.{rank}.json").write_text(json.dumps(outcome), encoding="utf-8")


def run_limited(folder: Path, rank: int) -> None:
    start_rules.SHORT_ON_RANKS = SHORT_ON_RANKS
    for name, (steps, settings) in LIMITED.items():
        with simulated(0.5) as time:
            Speed.latest = Speed()  # there is none in a plain run
            uneven = {"use_distributed_sampler": False} if "uneven" in name else {}
            loader = batches(steps + rank if uneven else 2 * steps)
            plugin = fit(Timed(time), loader=loader, devices=2, strategy="ddp", **settings, **uneven)
        status = plugin.report.of("speed").status
        (folder / f"{name}.{rank}.json").write_text(json.dumps(status), encoding="utf-8")
    start_rules.SHORT_ON_RANKS = 0


if __name__ == "__main__":
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    in_ranks(functools.partial(run_all, Path(sys.argv[1])), 2, patience_s=200)
