"""``lightning-accel export CKPT --form onnx --precision int8-dynamic``: exports a checkpoint for serving."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from lightning_accel.cli import calibration_data, checkpoints
from lightning_accel.cli.users_code import CheckpointError
from lightning_accel.deploy.combinations import HOLDS, NUMBERS, check_held

WRITTEN = 0
"""Exit status. Others are in :mod:`lightning_accel.cli.exit_codes`."""


def add_parser(subcommands: Any) -> None:
    """Adds ``export`` to the subcommands of an ``argparse`` parser."""
    parser: argparse.ArgumentParser = subcommands.add_parser(
        "export",
        help="a checkpoint as a file that is served: ONNX, a compiled package, TensorRT",
        description="Exports the model of a checkpoint, and checks that the file computes the same at several sizes."
        " The status is 0; 2 where nothing was written; 130 where Ctrl-C and 143 where SIGTERM has stopped it.",
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
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="where to (default: beside the checkpoint, as best.onnx, best.aoti.pt2, best.fp16.onnx)",
    )
    parser.add_argument(
        "--precision", default="32", help=f"{', '.join(NUMBERS)}, where the form is written with it (default: 32)"
    )
    calibration_data.add_argument(parser)
    parser.add_argument(
        "--dynamic",
        default="auto",
        help="dimensions of any size: auto, batch, batch+sequence or off (default: auto, what the model lets)",
    )
    parser.set_defaults(handler=run, runs_users_code=True)


def run(arguments: argparse.Namespace) -> int:
    """Writes the file. Returns the exit status."""
    # late: --help answers without torch
    from lightning_accel.deploy import export, quantize
    from lightning_accel.deploy.destination import default_path

    form, precision, path = arguments.form, arguments.precision, arguments.checkpoint
    check_held(form, precision)
    target = (arguments.out or default_path(path, form, precision)).expanduser()
    _check_apart(target, arguments)
    model = checkpoints.load_model(path, arguments.model)
    batches = calibration_data.load_batches(model, path, arguments.data, needed=precision == "int8-static")
    example = checkpoints.load_example(model, arguments.example, batches)
    made = model if precision == "32" else quantize(model, precision, calibration=batches)
    exported = export(made, example, form, path=target, dynamic=arguments.dynamic)
    if made is not model:
        print(made)
    print(exported)
    return WRITTEN


def _check_apart(target: Path, arguments: argparse.Namespace) -> None:
    """Raises a CheckpointError if an output would replace an input, by any name or link."""
    names = [name.partition(":")[0].replace(".", "/") for name in (arguments.model, arguments.data) if name]
    read = [arguments.checkpoint, arguments.example, *(Path(f"{name}.py") for name in names)]
    written = [target, target.with_suffix(".bin")] if arguments.form == "openvino" else [target]
    for one in written:
        for other in read:
            if other is not None and one.exists() and other.exists() and one.samefile(other):
                raise CheckpointError(f"{one} would replace {other}, which is read: give --out another file.")
