"""What one line buys: two real models, each trained plain and with AccelPlugin(), from the same weights.

    make demo                                     # or: python examples/demo.py

The four runs take turns, a few steps each, so that a busy minute of the machine hits all of them alike: what is
compared is one round with itself, and the ratios are medians over the rounds. Every run has a process of its own, so
that its peak of memory is its own, and sleeps while it is not its turn. The first round of each run is left out: there
the allocator and the caches warm up, and the accelerated run tries its changes.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from contextlib import ExitStack, closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from _comparison import Comparison, Line, compare, ratios
from _turns import Job, Outcome, Run

if TYPE_CHECKING:
    from lightning_accel.callbacks import EpochSpeed

MODELS = {
    "digits": "residual CNN on 40x40 handwritten digits, 32 a step",
    "bytes_gpt": "byte-level GPT of two blocks on Python's standard library, 4 x 512 tokens a step",
}
# For two slow cores: a turn is a few seconds there, and the table stands after three to four minutes.
SIZES = {"digits": {"size": 40, "batch_size": 32}, "bytes_gpt": {"seq_len": 512, "batch_size": 4, "depth": 2}}
BATCHES = {"digits": 26, "bytes_gpt": 15}  # runs that can pay for trials
MODES = ("plain", "accelerated")
ROUNDS = 10
FEWEST = 4  # steps of a turn: the first is not timed, and the speed of fewer than three is not measured

Rounds = dict[str, list[tuple["EpochSpeed", "EpochSpeed"]]]


def main() -> None:
    args = _parse_args()
    log_dir = args.log_dir / time.strftime("%Y%m%d-%H%M%S")
    jobs = {name: [job_of(name, mode, args, log_dir) for mode in MODES] for name in MODELS}
    start = time.perf_counter()
    with ExitStack() as stack:
        runs = {name: tuple(stack.enter_context(closing(Run(job))) for job in pair) for name, pair in jobs.items()}
        about = machine(args.accelerator)  # imports torch, while the children do the same
        print(f"{describe(about)}\n\nstarting four processes …", end=" ", flush=True)
        for run in (run for pair in runs.values() for run in pair):
            run.wait_for_gate()
        print(f"{time.perf_counter() - start:.0f} s", flush=True)
        rounds = take_turns(runs, args.rounds)
        outcomes = {name: (plain.outcome(), fast.outcome()) for name, (plain, fast) in runs.items()}
    comparisons = {name: compare(rounds[name], *outcomes[name]) for name in MODELS}
    show(comparisons, rounds)
    point_to_logs(outcomes, log_dir)
    print(f"\n{time.perf_counter() - start:.0f} s in all")
    if args.json is not None:
        write(args.json, about, rounds, outcomes, comparisons)


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train two models, plain and accelerated, and compare them.")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="rounds that count; one goes before them")
    parser.add_argument("--batches", type=int, help="training batches a turn; by default a few seconds' worth")
    parser.add_argument("--accelerator", default="auto", help="as in Lightning's Trainer: cpu, gpu, auto, …")
    parser.add_argument("--log-dir", type=Path, default=Path("demo_logs"), help="where the TensorBoard logs go")
    parser.add_argument("--json", type=Path, metavar="FOLDER", help="write what was measured there, named by machine")
    args = parser.parse_args()
    for option, least in (("rounds", 1), ("batches", FEWEST)):
        value = getattr(args, option)
        if value is not None and value < least:
            parser.error(f"--{option} {value}: there have to be {least} at least, to be measured")
    return args


def job_of(name: str, mode: str, args: argparse.Namespace, log_dir: Path) -> Job:
    turns = args.rounds + 1
    return Job(
        name=name,
        mode=mode,
        accelerator=args.accelerator,
        log_dir=log_dir,
        options={
            "epochs": turns,
            "check_val_every_n_epoch": turns,
            "limit_train_batches": BATCHES[name] if args.batches is None else args.batches,
            **SIZES[name],
        },
    )


def take_turns(runs: dict[str, tuple[Run, Run]], count: int) -> Rounds:
    """Rounds in which every run has a turn: plain first in one, accelerated first in the next."""
    rounds: Rounds = {name: [] for name in runs}
    for number in range(count + 1):
        start = time.perf_counter()
        for name, (plain, fast) in runs.items():
            if number % 2 == 0:
                turn = plain.take_turn(), fast.take_turn()
            else:
                second = fast.take_turn()
                turn = plain.take_turn(), second
            if number > 0:
                rounds[name].append(turn)
        if number == 0:
            words = "warming up and trying changes, not counted"
        else:
            words = ", ".join(f"{name} {ratios(found, 'samples_per_sec')[-1]:.2f}x" for name, found in rounds.items())
        print(f"round {number} of {count}, {time.perf_counter() - start:.0f} s: {words}", flush=True)
    return rounds


def machine(accelerator: str) -> dict[str, Any]:
    """The machine and the versions that the numbers belong to."""
    import lightning

    import lightning_accel
    from lightning_accel.claims.machine import machine as about
    from lightning_accel.core.host import Host

    host = Host.detect("cpu" if accelerator == "cpu" else None)
    return {**about(host), "lightning": lightning.__version__, "lightning_accel": lightning_accel.__version__}


def describe(about: dict[str, Any]) -> str:
    from lightning_accel.claims.machine import title

    versions = ", ".join(f"{name} {about[name]}" for name in ("torch", "lightning", "python"))
    return f"{title(about)}; threads: {about['threads']}; {versions}"


def show(comparisons: dict[str, Comparison], rounds: Rounds) -> None:
    """The table, then what it amounts to."""
    rows: list[tuple[str, ...]] = []
    for name, comparison in comparisons.items():
        rows.append((name, "", "", "", ""))
        rows += [_cells(line) for line in comparison.lines]
    print()
    print_table(("", *MODES, "ratio", "least to most"), rows)
    for name, comparison in comparisons.items():
        print(f"{name}, a {MODELS[name]}: {comparison.verdict}")
    source = next(iter(rounds.values()))[0][0].peak_memory_source
    count = len(next(iter(rounds.values())))
    print(
        f"Speed and memory: medians of {count} rounds in which the runs took turns, after one that is not counted;"
        " ratios: the median round's, and from the least to the most of a round.\n"
        f"Memory: {source}. Loss and accuracy: on the validation set."
    )


def _cells(line: Line) -> tuple[str, ...]:
    return (f"  {line.title}", line.plain, line.accelerated, line.ratio, line.spread)


def point_to_logs(outcomes: dict[str, tuple[Outcome, Outcome]], log_dir: Path) -> None:
    """What was done to each model, and where to look further."""
    for name, (_, fast) in outcomes.items():
        print(f"\n{name}: {fast.summary}")
        path = log_dir / name / "accelerated" / "report.json"
        path.write_text(json.dumps(fast.report, indent=2) + "\n", encoding="utf-8")
        print(f"  every site and every reason: {path}")
    tensorboard = Path(sys.executable).parent / "tensorboard"
    print(f"\nTensorBoard logs, accel/* among them: {log_dir.resolve()}")
    print(f"  to open them: {tensorboard if tensorboard.exists() else 'tensorboard'} --logdir {log_dir.resolve()}")


def write(
    folder: Path,
    about: dict[str, Any],
    rounds: Rounds,
    outcomes: dict[str, tuple[Outcome, Outcome]],
    comparisons: dict[str, Comparison],
) -> None:
    """Everything measured, in a file named by the machine: that of another machine stays as it is."""
    from lightning_accel.claims.machine import slug

    fields = ("samples_per_sec", "step_ms_p50", "peak_memory_mib")
    models = {
        name: {
            **asdict(comparisons[name]),
            "outcomes": dict(zip(MODES, map(asdict, outcomes[name]), strict=True)),
            "rounds": [
                {
                    mode: {field: getattr(turn, field) for field in fields}
                    for mode, turn in zip(MODES, pair, strict=True)
                }
                for pair in rounds[name]
            ],
        }
        for name in MODELS
    }
    record = {"machine": about, "date": time.strftime("%Y-%m-%d"), "note": "", "models": models}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{slug(about)}.json"
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(f"written: {path}")


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
