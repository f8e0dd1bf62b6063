"""``lightning-accel deploy CKPT --forms onnx,int8-dynamic``: a checkpoint in several forms, one recommended."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_accel.cli import checkpoints
from lightning_accel.cli.compare_command import share
from lightning_accel.cli.users_code import CheckpointError, batches_of, called

if TYPE_CHECKING:
    from lightning_accel.deploy.comparing import Comparison

COMPARED, WORSE = 0, 1
"""Exit statuses; others are of :mod:`lightning_accel.cli.exit_codes`."""

MAX_BATCHES = 50
"""So many batches of the data are looked at."""


def add_parser(subcommands: Any) -> None:
    """Adds ``deploy`` to the subcommands of an ``argparse`` parser."""
    parser: argparse.ArgumentParser = subcommands.add_parser(
        "deploy",
        help="a checkpoint in several forms: latency, throughput, size, accuracy; one is recommended",
        description="Measures the model of a checkpoint in several forms and recommends one. The status is 0; 1 where"
        " a form drops a metric by more than the limit; 2 where nothing could be compared; 130 where Ctrl-C and 143"
        " where SIGTERM has stopped it.",
    )
    checkpoints.add_arguments(parser)
    parser.add_argument(
        "--data", required=True, metavar="MODULE:FUNCTION", help="a function that returns batches of inputs and targets"
    )
    parser.add_argument(
        "--metrics", metavar="MODULE:FUNCTION", help="one that returns a metric of torchmetrics, or several by name"
    )
    parser.add_argument(
        "--forms",
        type=_names,
        default="int8-dynamic,bf16,torchscript,onnx,aoti",
        metavar="FORM,FORM",
        help="of export, of quantize, or both: torchscript+int8-dynamic (default: %(default)s)",
    )
    parser.add_argument(
        "--max-drop", type=share, default=0.01, metavar="1%", help="what a metric may be worse by (default: 1%%)"
    )
    parser.add_argument("--seconds", type=_seconds, default=5.0, help="of timing, for each form and size (default: 5)")
    parser.add_argument("--json", action="store_true", help="as JSON, and nothing else")
    parser.add_argument(
        "--run",
        type=Path,
        metavar="RUN",
        help="the folder of the run whose report is to show it (default: the one that the checkpoint lies in)",
    )
    parser.set_defaults(handler=run, runs_users_code=True)


def run(arguments: argparse.Namespace) -> int:
    """Prints the comparison; returns the exit status."""
    from lightning_accel.deploy.comparing import compare_forms  # late: --help answers without torch
    from lightning_accel.evidence.served import add_to_record

    record = _record_of(arguments.run, arguments.checkpoint)
    model = checkpoints.load_model(arguments.checkpoint, arguments.model)
    data = batches_of(arguments.data, "--data", at_most=MAX_BATCHES)
    metrics = _metrics(arguments.metrics) if arguments.metrics else None
    found = compare_forms(model, arguments.forms, data, metrics, max_drop=arguments.max_drop, seconds=arguments.seconds)
    if record is not None:
        add_to_record(record, arguments.checkpoint, found.to_dict())
    if arguments.json:
        print(json.dumps(found.to_dict(), indent=2))
    else:
        show(found)
        if record is not None:
            print(f"With its plot in the report of the run: lightning-accel report {record}")
    return WORSE if found.worse else COMPARED


def _metrics(name: str) -> Any:
    from torchmetrics import Metric, MetricCollection

    found = called(name, "--metrics")
    given = list(found.values()) if isinstance(found, Mapping | MetricCollection) else [found]
    if not given or not all(isinstance(one, Metric) for one in given):
        raise CheckpointError(
            f"--metrics {name} returned {found!r:.200}: a metric of torchmetrics, or a dictionary of names"
            " and such, is what it takes."
        )
    return found


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise argparse.ArgumentTypeError(f"{text!r} names no form: write some, as onnx,int8-dynamic, or eager alone.")
    return names


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no time: write seconds above 0, as 0.5.")
    return value


def _record_of(run: Path | None, checkpoint: Path) -> Path | None:
    """The record that the comparison is added to; None where the checkpoint lies in no run's folder.

    Raises:
        RecordError: There is none in the folder that was given.
    """
    from lightning_accel.evidence.record import FOLDER
    from lightning_accel.evidence.record_reader import read_record

    if run is not None:
        return read_record(run).path
    folders = checkpoint.resolve().parents[:2]  # checkpoints/ lies in the folder of its run
    run = next((folder for folder in folders if any(folder.glob(f"{FOLDER}/*-*.jsonl"))), None)
    return None if run is None else read_record(run).path


_WIDE = 1 << 16
"""Columns: tables take what they need, and lines end where a terminal wraps them, not in a cell."""


def _ms(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def show(found: Comparison) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from lightning_accel.core.byte_size import format_bytes

    metrics = list(next(iter(found.forms.values())).scores)
    sizes = list(next(iter(found.forms.values())).samples_per_sec)
    table = Table("form", "p50 ms", "p95", "p99", "speed", box=None)
    for name in (*(f"{size}: samples/s" for size in sizes), "first ms", "on disk", "in memory", "error"):
        table.add_column(name)
    scores = Table("form", *metrics, box=None)
    for name, form in found.forms.items():
        timing = form.latency
        row = [name, *map(_ms, (timing.p50, timing.p95, timing.p99)), str(form.speedup)]
        row += [f"{form.samples_per_sec[size]:,.0f}" if size in form.samples_per_sec else "no" for size in sizes]
        memory = "" if form.memory_bytes is None else format_bytes(form.memory_bytes)
        row += [_ms(form.first_call_ms), format_bytes(form.disk_bytes), memory, f"{form.error:.1e}"]
        style = "red" if name in found.worse else ""
        table.add_row(*map(escape, row), style=style)
        scores.add_row(*map(escape, (name, *(str(form.scores[metric]) for metric in metrics))), style=style)
    console = Console(width=_WIDE)
    console.print(table)
    if metrics:
        console.print(scores)
    for name, why in found.left_out.items():
        console.print(escape(f"! {name}: {why}"))
    for name, form in found.forms.items():
        for remark in form.remarks:
            console.print(escape(f"  {name}: {remark}"))
    for name, dropped in found.worse.items():
        for metric in dropped:
            score = found.forms[name].scores[metric]
            interval = f"[{score.drop_low:.3g}, {score.drop_high:.3g}]"
            console.print(
                escape(f"! {name}: {metric} is worse by {score.drop:.3g} {interval}, allowed {found.max_drop:g}")
            )
    console.print(escape(f"Take {found.recommended}: {found.why}"))
