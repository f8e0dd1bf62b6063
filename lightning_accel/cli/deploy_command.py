"""``lightning-accel deploy CKPT --forms onnx,int8-dynamic``: compares forms of a checkpoint and recommends one."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from lightning_accel.cli import checkpoints
from lightning_accel.cli.command import print_json
from lightning_accel.cli.compare_command import share
from lightning_accel.cli.users_code import CheckpointError, batches_of, called

MAX_BATCHES = 50  # number of batches used


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


def deploy(
    checkpoint: checkpoints.Checkpoint,
    *,
    model: checkpoints.ClassName = None,
    data: Annotated[str, {"metavar": "MODULE:FUNCTION"}],
    metrics: Annotated[str | None, {"metavar": "MODULE:FUNCTION"}] = None,
    forms: Annotated[Any, {"type": _names, "metavar": "FORM,FORM"}] = "int8-dynamic,bf16,torchscript,onnx,aoti",
    max_drop: Annotated[float, {"type": share, "metavar": "1%"}] = 0.01,
    seconds: Annotated[float, {"type": _seconds}] = 5.0,
    json: bool = False,
    run: Annotated[Path | None, {"metavar": "RUN"}] = None,
) -> int:
    """Measures the model of a checkpoint in several forms and recommends one.

    The status is 0; 1 where a form drops a metric by more than the limit; 2 where nothing could be compared; 130 where
    Ctrl-C and 143 where SIGTERM has stopped it.

    Args:
        checkpoint: a Lightning checkpoint, one file
        model: the LightningModule, such as train:Digits for a class in train.py; it has saved its hyperparameters
            (default: the class that LightningCLI has noted in the checkpoint or in config.yaml beside it)
        data: a function that returns batches of inputs and targets
        metrics: one that returns a metric of torchmetrics, or several by name
        forms: of export, of quantize, or both: torchscript+int8-dynamic (default:
            int8-dynamic,bf16,torchscript,onnx,aoti)
        max_drop: what a metric may be worse by (default: 1%)
        seconds: of timing, for each form and size (default: 5)
        json: as JSON, and nothing else
        run: the folder of the run whose report is to show it (default: the one that the checkpoint lies in)
    """
    from lightning_accel.deploy.comparing import compare_forms  # late: --help answers without torch
    from lightning_accel.evidence.record import append
    from lightning_accel.evidence.served import Served

    record = _record_of(run, checkpoint)
    module = checkpoints.load_model(checkpoint, model)
    batches = batches_of(data, "--data", at_most=MAX_BATCHES)
    found = compare_forms(
        module, forms, batches, _metrics(metrics) if metrics else None, max_drop=max_drop, seconds=seconds
    )
    if record is not None:
        append(record, Served.from_dict(str(checkpoint), found.to_dict()))
    if json:
        print_json(found.to_dict())
    else:
        print(found)
        if record is not None:
            print(f"With its plot in the report of the run: lightning-accel report {record}")
    return 1 if found.worse else 0


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
