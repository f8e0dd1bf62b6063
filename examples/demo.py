"""What one line buys: two real models, each trained plain and with AccelPlugin(), from the same weights.

    make demo                                     # or: python examples/demo.py

Every run has a process of its own, so that its peak of memory is its own, and both sides of a comparison are measured
by the same callback. The first epoch of each run is left out of the speed: there the allocator and the caches warm up,
and the accelerated run tries its changes.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MODELS = {
    "digits": "residual CNN, 64x64 handwritten digits",
    "bytes_gpt": "byte-level GPT, Python's standard library",
}
MODES = ("plain", "accelerated")


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one training run measured.

    Attributes:
        samples_per_sec: Median over the epochs after the first.
        step_ms_p50: Median step in milliseconds, over the same epochs.
        peak_memory_mib: The highest peak of those epochs.
        peak_memory_source: Whose memory that is.
        first_loss: Validation loss before any training.
        final_loss: Validation loss after the last epoch.
        final_accuracy: Validation accuracy after the last epoch, where the model has one.
        seconds: Wall time of the whole run, start of the process included.
        summary: A line a technique, in the words of the report; empty for a plain run.
        report: The whole report as plain values.
    """

    samples_per_sec: float
    step_ms_p50: float
    peak_memory_mib: float
    peak_memory_source: str
    first_loss: float
    final_loss: float
    final_accuracy: float | None
    seconds: float = 0.0
    summary: str = ""
    report: dict[str, Any] | None = None


def main() -> None:
    args = _parse_args()
    if args.child is not None:
        run = train_and_measure(args.child, args.mode, args)
        args.result.write_text(json.dumps(asdict(run)), encoding="utf-8")
        return
    args.log_dir = args.log_dir / time.strftime("%Y%m%d-%H%M%S")
    print(f"{describe_machine(args.accelerator)}\n")
    runs: dict[str, dict[str, Run]] = {name: {} for name in MODELS}
    for index, (name, mode) in enumerate((name, mode) for name in MODELS for mode in MODES):
        print(f"[{index + 1}/{len(MODELS) * len(MODES)}] {name}, {mode} …", end=" ", flush=True)
        runs[name][mode] = run_in_own_process(name, mode, args)
        print(f"{runs[name][mode].seconds:.0f} s", flush=True)
    show(runs, args.log_dir)
    if args.json is not None:
        results = {name: {mode: asdict(run) for mode, run in by_mode.items()} for name, by_mode in runs.items()}
        args.json.write_text(
            json.dumps({**machine(args.accelerator), "runs": results}, indent=2) + "\n", encoding="utf-8"
        )


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train two models, plain and accelerated, and compare them.")
    parser.add_argument("--epochs", type=int, help="epochs of every run, two at least; by default each example's own")
    parser.add_argument("--batches", type=int, help="training batches an epoch; by default each example's own")
    parser.add_argument("--accelerator", default="auto", help="as in Lightning's Trainer: cpu, gpu, auto, …")
    parser.add_argument("--log-dir", type=Path, default=Path("demo_logs"), help="where the TensorBoard logs go")
    parser.add_argument("--json", type=Path, help="write everything measured to this file, too")
    parser.add_argument("--child", choices=MODELS, help=argparse.SUPPRESS)
    parser.add_argument("--mode", choices=MODES, default="plain", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.epochs is not None and args.epochs < 2:
        parser.error(f"--epochs {args.epochs}: the first epoch is not timed, so there have to be two at least")
    return args


def run_in_own_process(name: str, mode: str, args: argparse.Namespace) -> Run:
    """Trains in a fresh interpreter, so that neither memory nor caches carry over from another run."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "run.json"
        command = [sys.executable, __file__, "--child", name, "--mode", mode, "--result", str(result)]
        command += ["--accelerator", args.accelerator, "--log-dir", str(args.log_dir)]
        for option in ("epochs", "batches"):
            if getattr(args, option) is not None:
                command += [f"--{option}", str(getattr(args, option))]
        start = time.perf_counter()
        process = subprocess.run(command, capture_output=True, text=True, check=False)
        if process.returncode != 0:
            sys.exit(f"failed:\n{process.stdout}\n{process.stderr}")
        seconds = time.perf_counter() - start
        return Run(**{**json.loads(result.read_text(encoding="utf-8")), "seconds": seconds})


def train_and_measure(name: str, mode: str, args: argparse.Namespace) -> Run:
    """One run, in this process: ``examples/<name>.py`` as it stands, with a logger and the measuring callback."""
    from lightning.pytorch.loggers import TensorBoardLogger

    from lightning_accel.callbacks import SpeedMemoryLogger

    # Lightning's advice on the number of workers and the like, which is the same for both sides.
    warnings.filterwarnings("ignore", module=r"lightning\.pytorch")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    speed = SpeedMemoryLogger()
    first_loss = _first_loss_recorder()
    options: dict[str, Any] = {} if args.epochs is None else {"epochs": args.epochs}
    if args.batches is not None:
        options["limit_train_batches"] = args.batches
    trainer = importlib.import_module(name).train(
        plain=mode == "plain",
        callbacks=[speed, first_loss],
        logger=TensorBoardLogger(args.log_dir, name=name, version=mode),
        accelerator=args.accelerator,
        devices=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    timed = speed.history[1:]
    accuracy = trainer.callback_metrics.get("val/accuracy")
    report = None if mode == "plain" else trainer.precision_plugin.report
    return Run(
        samples_per_sec=statistics.median(epoch.samples_per_sec for epoch in timed),
        step_ms_p50=statistics.median(epoch.step_ms_p50 for epoch in timed),
        peak_memory_mib=max(epoch.peak_memory_mib for epoch in timed),
        peak_memory_source=timed[0].peak_memory_source,
        first_loss=first_loss.value,
        final_loss=float(trainer.callback_metrics["val/loss"]),
        final_accuracy=None if accuracy is None else float(accuracy),
        summary="" if report is None else report.summary(),
        report=None if report is None else report.to_dict(),
    )


def _first_loss_recorder() -> Any:
    from lightning.pytorch import Callback

    class FirstLoss(Callback):
        """Keeps the validation loss of Lightning's sanity check, which comes before any training."""

        value = float("nan")

        def on_sanity_check_end(self, trainer: Any, pl_module: Any) -> None:
            self.value = float(trainer.callback_metrics["val/loss"])

    return FirstLoss()


def machine(accelerator: str) -> dict[str, Any]:
    """The machine and the versions that the numbers belong to."""
    import lightning
    import torch

    from lightning_accel import Host

    host = Host.detect("cpu" if accelerator == "cpu" else None)
    return {
        "device": host.device_name,
        "kind": host.kind,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "lightning": lightning.__version__,
        "python": sys.version.split()[0],
    }


def describe_machine(accelerator: str) -> str:
    facts = machine(accelerator)
    cores = f", {facts['threads']} threads" if facts["kind"] == "cpu" else ""
    versions = ", ".join(f"{name} {facts[name]}" for name in ("torch", "lightning", "python"))
    return f"{facts['device']}{cores}; {versions}"


def show(runs: dict[str, dict[str, Run]], log_dir: Path) -> None:
    """The table, then what was done to each model, then where to look further."""
    rows: list[tuple[str, str, str, str]] = []
    for name, by_mode in runs.items():
        rows.append((f"{name}: {MODELS[name]}", "", "", ""))
        rows += _rows(by_mode["plain"], by_mode["accelerated"])
    print()
    print_table(("", *MODES, "ratio"), rows)
    source = next(iter(runs.values()))["plain"].peak_memory_source
    print("Speed and memory: the epochs after the first, in which the accelerated run tries its changes.")
    print(f"Memory: {source}. Loss and accuracy: on the validation set.")
    for name, by_mode in runs.items():
        print(f"\n{name}: {by_mode['accelerated'].summary}")
        path = log_dir / name / "accelerated" / "report.json"
        path.write_text(json.dumps(by_mode["accelerated"].report, indent=2) + "\n", encoding="utf-8")
        print(f"  every site and every reason: {path}")
    tensorboard = Path(sys.executable).parent / "tensorboard"
    print(f"\nTensorBoard logs, accel/* among them: {log_dir.resolve()}")
    print(f"  to open them: {tensorboard if tensorboard.exists() else 'tensorboard'} --logdir {log_dir.resolve()}")


def _rows(plain: Run, fast: Run) -> list[tuple[str, str, str, str]]:
    def ratio(name: str) -> str:
        return f"{getattr(fast, name) / getattr(plain, name):.2f}x"

    rows = [
        ("  samples/s", f"{plain.samples_per_sec:.1f}", f"{fast.samples_per_sec:.1f}", ratio("samples_per_sec")),
        ("  step p50, ms", f"{plain.step_ms_p50:.1f}", f"{fast.step_ms_p50:.1f}", ratio("step_ms_p50")),
        ("  peak memory, MiB", f"{plain.peak_memory_mib:.0f}", f"{fast.peak_memory_mib:.0f}", ratio("peak_memory_mib")),
        ("  loss before", f"{plain.first_loss:.3f}", f"{fast.first_loss:.3f}", ""),
        (
            "  loss after",
            f"{plain.final_loss:.3f}",
            f"{fast.final_loss:.3f}",
            f"{fast.final_loss / plain.final_loss - 1:+.1%}",
        ),
    ]
    if plain.final_accuracy is not None and fast.final_accuracy is not None:
        change = fast.final_accuracy - plain.final_accuracy
        rows.append(("  accuracy", f"{plain.final_accuracy:.1%}", f"{fast.final_accuracy:.1%}", f"{change:+.1%}"))
    return rows


def print_table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    """With rich where it is installed, which it is unless this runs straight from a checkout."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ModuleNotFoundError:
        widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
        for row in [header, *rows]:
            cells = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
            print("  ".join([row[0].ljust(widths[0]), *cells]))
        return
    table = Table()
    for column, name in enumerate(header):
        table.add_column(name, justify="right" if column else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row, style="bold" if not row[1] else None)
    # Not cut to 80 columns where the output goes to a file.
    console = Console()
    Console(width=max(console.width, 100)).print(table)


if __name__ == "__main__":
    main()
