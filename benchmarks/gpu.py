"""The demo's two models on a GPU, at a size worth one: plain, with Lightning's bf16-mixed, with AccelPlugin().

    make gpu PYTHON=python3                                 # GPU tests first, then this
    python benchmarks/gpu.py --out docs/results             # the package installed

Every side starts from the same weights and sees the same batches; rounds alternate between the sides, and a number is
the median over rounds of the median over epochs, the first epoch left out. Takes under five minutes.
"""

from __future__ import annotations

import gc
import importlib.util
import logging
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from _gpu import arguments, is_possible, write
from _gpu import table as aligned

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

SIDES = ("plain", "bf16-mixed", "AccelPlugin")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model and its data, and how long to train it.

    Attributes:
        build: Makes the module and the data module.
        epochs: The first is not measured.
        batches: Training batches an epoch, at most.
        needs: A package beyond the project's own that it cannot do without.
    """

    build: Callable[[], tuple[Any, Any]]
    epochs: int
    batches: int
    needs: str | None = None


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One side's numbers; rates and times are medians, the peak is the highest."""

    samples_per_sec: float
    step_ms_p50: float
    peak_memory_mib: float
    mfu: float | None
    loss: float
    report: str = ""


def digits_case(small: bool) -> Case:
    def build() -> tuple[Any, Any]:
        from digits import Digits, DigitsNet

        model = DigitsNet(width=8, blocks_per_stage=1) if small else DigitsNet(width=64, blocks_per_stage=2)
        return model, Digits(batch_size=128, size=16 if small else 64)

    return Case(build=build, epochs=6, batches=11, needs="sklearn")


def gpt_case(small: bool) -> Case:
    def build() -> tuple[Any, Any]:
        from bytes_gpt import BytesGPT, StdlibText

        if small:
            return BytesGPT(dim=32, depth=2, num_heads=2, seq_len=64, lr=3e-4), StdlibText(batch_size=4, seq_len=64)
        model = BytesGPT(dim=768, depth=12, num_heads=12, seq_len=1024, lr=3e-4)
        return model, StdlibText(batch_size=16, seq_len=1024)

    return Case(build=build, epochs=3, batches=4 if small else 30)


CASES = {"digits": digits_case, "bytes_gpt": gpt_case}


def main() -> None:
    parser = arguments("Measure the demo's models on a GPU.")
    parser.add_argument("--rounds", type=int, default=2, help="how often every side is trained")
    args = parser.parse_args()
    if not is_possible(args):
        return
    warnings.filterwarnings("ignore", module=r"lightning\.pytorch")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    results: dict[str, dict[str, Measured]] = {}
    for name, make_case in CASES.items():
        case = make_case(args.dry_run)
        if case.needs is not None and importlib.util.find_spec(case.needs) is None:
            print(f"{name}: skipped, {case.needs} is not installed")
            continue
        results[name] = measure(name, case, args.rounds)
    text = table(results)
    print(f"\n{text}")
    values = {name: {side: asdict(run) for side, run in by_side.items()} for name, by_side in results.items()}
    write("", args.out, {"results": values}, "", text)


def measure(name: str, case: Case, rounds: int) -> dict[str, Measured]:
    """Trains every side ``rounds`` times, in turn."""
    by_side: dict[str, list[Measured]] = {side: [] for side in SIDES}
    for index in range(rounds):
        for side in SIDES:
            start = time.perf_counter()
            by_side[side].append(train(case, side))
            seconds = time.perf_counter() - start
            print(f"{name}, {side}, round {index + 1} of {rounds}: {seconds:.0f} s", flush=True)
    return {side: _median(runs) for side, runs in by_side.items()}


def train(case: Case, side: str) -> Measured:
    """One training run."""
    from lightning.pytorch import Trainer, seed_everything

    from lightning_accel import AccelPlugin
    from lightning_accel.callbacks import SpeedMemoryLogger

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    seed_everything(0, verbose=False)
    model, data = case.build()
    speed = SpeedMemoryLogger(every_s=0.0)
    plugin = AccelPlugin() if side == "AccelPlugin" else None
    trainer = Trainer(
        plugins=[plugin] if plugin is not None else None,
        precision="bf16-mixed" if side == "bf16-mixed" else None,
        max_epochs=case.epochs,
        limit_train_batches=case.batches,
        limit_val_batches=4,
        num_sanity_val_steps=0,
        gradient_clip_val=1.0,
        callbacks=[speed],
        accelerator="auto",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, datamodule=data)
    timed = speed.history[1:]
    mfu = [epoch.mfu for epoch in timed if epoch.mfu is not None]
    return Measured(
        samples_per_sec=statistics.median(epoch.samples_per_sec for epoch in timed),
        step_ms_p50=statistics.median(epoch.step_ms_p50 for epoch in timed),
        peak_memory_mib=max(epoch.peak_memory_mib for epoch in timed),
        mfu=statistics.median(mfu) if mfu else None,
        loss=float(trainer.callback_metrics["val/loss"]),
        report="" if plugin is None else plugin.report.to_text(),
    )


def _median(runs: list[Measured]) -> Measured:
    mfu = [run.mfu for run in runs if run.mfu is not None]
    return Measured(
        samples_per_sec=statistics.median(run.samples_per_sec for run in runs),
        step_ms_p50=statistics.median(run.step_ms_p50 for run in runs),
        peak_memory_mib=max(run.peak_memory_mib for run in runs),
        mfu=statistics.median(mfu) if mfu else None,
        loss=statistics.median(run.loss for run in runs),
        report=runs[-1].report,
    )


def table(results: dict[str, dict[str, Measured]]) -> str:
    """A Markdown table, readable as it stands; ratios are to the plain run."""
    rows = [["model", "run", "samples/s", "ratio", "step p50, ms", "peak, MiB", "ratio", "MFU", "validation loss"]]
    for name, by_side in results.items():
        plain = by_side["plain"]
        for side, run in by_side.items():
            rows.append(
                [
                    name,
                    side,
                    f"{run.samples_per_sec:,.0f}",
                    f"{run.samples_per_sec / plain.samples_per_sec:.2f}x",
                    f"{run.step_ms_p50:.2f}",
                    f"{run.peak_memory_mib:,.0f}",
                    f"{run.peak_memory_mib / plain.peak_memory_mib:.2f}x",
                    "" if run.mfu is None else f"{run.mfu:.1%}",
                    f"{run.loss:.4f}",
                ]
            )
    return aligned(rows)


if __name__ == "__main__":
    main()
