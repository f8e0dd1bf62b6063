"""A step under `accel_ddp` against one under Lightning's `ddp`, two CPU processes with the same plugin.

    python benchmarks/strategies.py [--json docs/results]

To answer: at least as fast. The two strategies take turns, fit by fit, in the same processes; float32. Lightning's side
is the one that trains the model: `ddp` fails on a layer that no step uses. Takes about two minutes.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from _measure import publish
from _strategies import LanguageModel, step_times
from torch import nn

from lightning_accel import AccelPlugin
from lightning_accel.claims.measure import median_ratio

PROCESSES, STEPS, ROUNDS = 2, 12, 6
SIZES = {"blocks": 6, "width": 256, "vocabulary": 1024}


class WithSpare(LanguageModel):
    def __init__(self) -> None:
        super().__init__(**SIZES)
        self.spare = nn.Linear(256, 256)


MODELS = {
    "every parameter used": (lambda: LanguageModel(**SIZES), "ddp"),
    "a layer unused": (WithSpare, "ddp_find_unused_parameters_true"),
}


def work(out: Path) -> None:
    """One of the processes."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    tokens = torch.randint(SIZES["vocabulary"], (4, 4, 128))
    spent: dict[str, dict[str, list[float]]] = {}
    for name, (make, plain) in MODELS.items():
        sides = spent[name] = {plain: [], "accel_ddp": []}
        for round_ in range(ROUNDS):
            for side in list(sides)[:: 1 if round_ % 2 == 0 else -1]:
                plugin = AccelPlugin(precision="32-true", techniques={"flash_attention": "off"}, report=False)
                options: dict[str, Any] = {"accelerator": "cpu", "devices": PROCESSES, "plugins": [plugin]}
                sides[side].append(statistics.median(step_times(make(), tokens, side, steps=STEPS, **options)))
    if os.environ["RANK"] == "0":
        out.write_text(json.dumps(spent), encoding="utf-8")


def main() -> None:
    if "RANK" in os.environ:
        work(Path(sys.argv[1]))
        return
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "times.json"
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={PROCESSES}"]
        subprocess.run([*launch, __file__, str(out)], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        spent = json.loads(out.read_text(encoding="utf-8"))
    rows = []
    for name, sides in spent.items():
        plain, accel = sides
        medians = [statistics.median(sides[side]) for side in (plain, accel)]
        ratio = median_ratio(sides[accel], sides[plain])
        rows.append([name, plain, *(f"{ms:.1f} ms" for ms in medians), f"{ratio:.3f}x"])
    columns = ["model", "Lightning's", "its step", "`accel_ddp`", "ratio of paired fits"]
    publish("strategies", "python benchmarks/strategies.py", columns, rows, spent)


if __name__ == "__main__":
    main()
