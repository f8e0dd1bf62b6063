"""The demo's two models on a GPU, at a size worth one: plain, with Lightning's bf16-mixed, with AccelPlugin().

    make gpu-bench PYTHON=python3 ONLY=gpu                  # the machine's own torch and Lightning
    python benchmarks/gpu.py --out docs/results             # the package installed

Every side starts from the same weights, sees the same batches, and trains for 30 seconds as the beginning of a run of
hours: what the plugin may spend on deciding grows with a run, and a short one stays plain. What is measured are the
later epochs, when it has decided: a number is the median of their medians. Takes under four minutes.
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
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from _gpu import arguments, is_possible, write
from _gpu import table as aligned

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

SIDES = ("plain", "bf16-mixed", "AccelPlugin")
SECONDS = 30
EPOCHS = 2_000
"""What the Trainer is told, and never comes to."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model and its data.

    Attributes:
        build: Makes the module and the data module.
        batches: Training batches an epoch, at most.
        needs: A package beyond the project's own that it cannot do without.
    """

    build: Callable[[], tuple[Any, Any]]
    batches: int
    needs: str | None = None


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One side's numbers; rates and times are medians, the peak is the highest, the loss that of the end."""

    steps: int
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

    return Case(build=build, batches=11, needs="sklearn")


def gpt_case(small: bool) -> Case:
    def build() -> tuple[Any, Any]:
        from bytes_gpt import BytesGPT, StdlibText

        if small:
            return BytesGPT(dim=32, depth=2, num_heads=2, seq_len=64, lr=3e-4), StdlibText(batch_size=4, seq_len=64)
        return BytesGPT(dim=512, depth=8, num_heads=8, seq_len=512, lr=3e-4), StdlibText(batch_size=16, seq_len=512)

    return Case(build=build, batches=4 if small else 30)


CASES = {"digits": digits_case, "bytes_gpt": gpt_case}


def main() -> None:
    args = arguments("Measure the demo's models on a GPU.").parse_args()
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
        results[name] = {}
        for side in SIDES:
            start = time.perf_counter()
            results[name][side] = train(case, side, 4 if args.dry_run else EPOCHS)
            print(f"{name}, {side}: {time.perf_counter() - start:.0f} s", flush=True)
    text = table(results)
    print(f"\n{text}")
    values = {name: {side: asdict(run) for side, run in by_side.items()} for name, by_side in results.items()}
    write("", args.out, {"results": values}, "", text)


def train(case: Case, side: str, epochs: int) -> Measured:
    """One training run: of so many epochs, or the beginning of it."""
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
        max_epochs=epochs,
        max_time=timedelta(seconds=SECONDS),
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
    history = speed.history[:-1] or speed.history  # the last epoch may have been broken off
    timed = history[len(history) * 2 // 3 :]
    mfu = [epoch.mfu for epoch in timed if epoch.mfu is not None]
    return Measured(
        steps=trainer.global_step,
        samples_per_sec=statistics.median(epoch.samples_per_sec for epoch in timed),
        step_ms_p50=statistics.median(epoch.step_ms_p50 for epoch in timed),
        peak_memory_mib=max(epoch.peak_memory_mib for epoch in timed),
        mfu=statistics.median(mfu) if mfu else None,
        loss=float(trainer.callback_metrics["val/loss"]),
        report="" if plugin is None else plugin.report.to_text(),
    )


def table(results: dict[str, dict[str, Measured]]) -> str:
    """A Markdown table, readable as it stands; ratios are to the plain run, the validation loss is that of the end."""
    rows = [["model", "run", "samples/s", "ratio", "step p50, ms", "peak, MiB", "ratio", "MFU", "steps", "loss"]]
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
                    f"{run.steps:,}",
                    f"{run.loss:.4f}",
                ]
            )
    return aligned(rows)


if __name__ == "__main__":
    main()
