"""``lightning-accel export CKPT --form onnx --precision int8-dynamic``: a checkpoint as a file that is served."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from lightning_accel.cli import calibration, checkpoints
from lightning_accel.deploy.combinations import HOLDS, NUMBERS, check_held

WRITTEN, NOT_WRITTEN = 0, 2
"""Exit statuses."""


def add_parser(subcommands: Any) -> None:
    """Adds ``export`` to the subcommands of an ``argparse`` parser."""
    parser: argparse.ArgumentParser = subcommands.add_parser(
        "export",
        help="a checkpoint as a file that is served: ONNX, a compiled package, TensorRT",
        description="Exports the model of a checkpoint, and checks that the file computes the same at several sizes."
        " The status is 0, or 2 where nothing was written.",
        epilog="precisions of each form: " + "; ".join(f"{form}: {', '.join(held)}" for form, held in HOLDS.items()),
    )
    checkpoints.add_arguments(parser)
    parser.add_argument("--form", default="pt2", help=f"{', '.join(HOLDS)} (default: pt2)")
    parser.add_argument(
        "--example",
        type=Path,
        metavar="FILE",
        help="what the model takes, or a batch, by torch.save (default: its example_input_array, or the first of the"
        " data)",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="where to (default: beside the checkpoint)")
    parser.add_argument(
        "--precision", default="32", help=f"{', '.join(NUMBERS)}, where the form is written with it (default: 32)"
    )
    calibration.add_argument(parser)
    parser.add_argument(
        "--dynamic",
        default="auto",
        help="dimensions of any size: auto, batch, batch+sequence or off (default: auto, what the model lets)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Writes the file; returns the exit status."""
    # late: --help answers without torch
    from lightning_accel.deploy import ExportError, MissingPackageError, QuantizeError, export, quantize
    from lightning_accel.deploy.forms import FORMS

    form, precision, path = arguments.form, arguments.precision, arguments.checkpoint
    try:
        check_held(form, precision)
        model = checkpoints.load_model(path, arguments.model)
        batches = calibration.load_batches(model, path, arguments.data, needed=precision == "int8-static")
        example = checkpoints.load_example(model, arguments.example, batches)
        made = model if precision == "32" else quantize(model, precision, calibration=batches)
        target = arguments.out or path.with_suffix(FORMS[form].ending)
        exported = export(made, example, form, path=target, dynamic=arguments.dynamic)
    except (ValueError, OSError, ExportError, QuantizeError, MissingPackageError) as error:
        print(f"lightning-accel export: {error}", file=sys.stderr)
        return NOT_WRITTEN
    if made is not model:
        print(made)
    print(exported)
    return WRITTEN
