"""``lightning-accel deploy CKPT --forms onnx,int8-dynamic``: compares forms of a checkpoint and recommends one."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_accel.cli import checkpoints
from lightning_accel.cli.compare_command import share
from lightning_accel.cli.users_code import CheckpointError, batches_of, called

COMPARED, WORSE = 0, 1
"""Exit statuses. Others are in :mod:`lightning_accel.cli.exit_codes`."""

MAX_BATCHES = 50  # number of batches used


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
    """Prints the comparison. Returns the exit status."""
    from lightning_accel.deploy.comparing import compare_forms  # late: --help answers without torch
    from lightning_accel.evidence.record import append
    from lightning_accel.evidence.served import Served

    record = _record_of(arguments.run, arguments.checkpoint)
    model = checkpoints.load_model(arguments.checkpoint, arguments.model)
    data = batches_of(arguments.data, "--data", at_most=MAX_BATCHES)
    metrics = _metrics(arguments.metrics) if arguments.metrics else None
    found = compare_forms(model, arguments.forms, data, metrics, max_drop=arguments.max_drop, seconds=arguments.seconds)
    if record is not None:
        append(record, Served.from_dict(str(arguments.checkpoint), found.to_dict()))
    if arguments.json:
        print(json.dumps(found.to_dict(), indent=2))
    else:
        print(found)
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
    """Returns the record to which the comparison is added; None if the checkpoint is not in a run's folder.

    Raises:
        RecordError: The given folder has no record.
    """
    from lightning_accel.evidence.record import FOLDER
    from lightning_accel.evidence.record_reader import read_record

    if run is not None:
        return read_record(run).path
    folders = checkpoint.resolve().parents[:2]  # checkpoints/ is in its run's folder
    run = next((folder for folder in folders if any(folder.glob(f"{FOLDER}/*-*.jsonl"))), None)
    return None if run is None else read_record(run).path
