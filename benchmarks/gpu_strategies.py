"""Steps under each strategy on one GPU: `accel` against SingleDeviceStrategy with the plugin, DDP and FSDP over NCCL.

    make gpu PYTHON=python3                                       # among the rest
    python benchmarks/gpu_strategies.py --out docs/results        # the package installed

A 350M language model, bfloat16, batches of 8x1024 tokens from the host. To reach: a step of `accel` within 1% of one
under SingleDeviceStrategy with the plugin. With one process DDP and FSDP have nobody to talk to: what shows is what
they cost by themselves. Takes about three minutes.
"""

from __future__ import annotations

import os
import statistics
import warnings
from dataclasses import asdict, dataclass
from typing import Any

import torch
from _gpu import arguments, is_possible, table, write
from _strategies import LanguageModel, step_times
from lightning.pytorch.strategies import SingleDeviceStrategy

import lightning_accel  # noqa: F401  # registers the names
from lightning_accel.claims.measure import median_ratio

SIDES = ("SingleDeviceStrategy", "accel", "ddp", "accel_ddp", "accel_fsdp")


@dataclass(frozen=True)
class Step:
    """A strategy's step.

    Attributes:
        strategy: Its name.
        ms: The median of the rounds.
        ratio: To a step under SingleDeviceStrategy, the median of paired rounds.
        peak_mib: The most that torch's allocator held in a fit.
    """

    strategy: str
    ms: float
    ratio: float
    peak_mib: float


def measure(sizes: dict[str, int], tokens: torch.Tensor, rounds: int, steps: int) -> list[Step]:
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    spent: dict[str, list[float]] = {side: [] for side in SIDES}
    peaks = dict.fromkeys(SIDES, 0.0)
    for round_ in range(rounds):
        for side in SIDES[:: 1 if round_ % 2 == 0 else -1]:
            strategy: Any = SingleDeviceStrategy(device) if side == "SingleDeviceStrategy" else side
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            accelerator = "gpu" if torch.cuda.is_available() else "cpu"
            times = step_times(
                LanguageModel(**sizes), tokens, strategy, steps=steps, accelerator=accelerator, devices=1
            )
            spent[side].append(statistics.median(times))
            if torch.cuda.is_available():
                peaks[side] = max(peaks[side], torch.cuda.max_memory_allocated() / 2**20)
    return [
        Step(side, statistics.median(spent[side]), median_ratio(spent[side], spent[SIDES[0]]), peaks[side])
        for side in SIDES
    ]


def main() -> None:
    parser = arguments("Measure the strategies on a GPU.")
    parser.add_argument("--rounds", type=int, default=5, help="how many fits every strategy gets")
    args = parser.parse_args()
    if not is_possible(args):
        return
    warnings.filterwarnings("ignore")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    sizes = {"blocks": 24, "width": 1024, "vocabulary": 32768}
    shape, steps = (4, 8, 1024), 20
    if args.dry_run:
        sizes, shape, steps = {"blocks": 2, "width": 64, "vocabulary": 64}, (2, 2, 16), 2
    runs = measure(sizes, torch.randint(sizes["vocabulary"], shape), args.rounds, steps)
    rows = [["strategy, one process", "step", "to SingleDeviceStrategy", "peak memory"]]
    rows += [[run.strategy, f"{run.ms:.1f} ms", f"{run.ratio:.3f}x", f"{run.peak_mib:,.0f} MiB"] for run in runs]
    text = table(rows)
    print(f"\n{text}")
    write("strategies", args.out, {"steps": [asdict(run) for run in runs]}, "Strategies with the same plugin, on", text)


if __name__ == "__main__":
    main()
