"""``lightning-accel export CKPT --form onnx --example batch.pt``: a checkpoint as a file that is served."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from lightning_accel.cli import checkpoints

WRITTEN, NOT_WRITTEN = 0, 2
"""Exit statuses."""


def add_parser(subcommands: Any) -> None:
    """Adds ``export`` to the subcommands of an ``argparse`` parser."""
    parser: argparse.ArgumentParser = subcommands.add_parser(
        "export",
        help="a checkpoint as a file that is served: ONNX, a compiled package, TensorRT",
        description="Exports the model of a checkpoint, and checks that the file computes the same at several sizes."
        " The status is 0, or 2 where nothing was written.",
    )
    checkpoints.add_arguments(parser)
    parser.add_argument(
        "--form", default="pt2", help="pt2, aoti, onnx, tensorrt, torchscript or openvino (default: pt2)"
    )
    parser.add_argument(
        "--example",
        type=Path,
        metavar="FILE",
        help="what the model takes, or a batch, by torch.save (default: its example_input_array)",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="where to (default: beside the checkpoint)")
    parser.add_argument("--precision", default="32", help="32, fp16 or bf16 (default: 32)")
    parser.add_argument(
        "--dynamic",
        default="auto",
        help="dimensions of any size: auto, batch, batch+sequence or off (default: auto, what the model lets)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Writes the file; returns the exit status."""
    from lightning_accel.deploy import ExportError, MissingPackageError, export  # late: --help answers without torch
    from lightning_accel.deploy.forms import FORMS

    try:
        model = checkpoints.load_model(arguments.checkpoint, arguments.model)
        ending = FORMS[arguments.form].ending if arguments.form in FORMS else ""
        exported = export(
            model,
            checkpoints.load_example(model, arguments.example),
            arguments.form,
            path=arguments.out or arguments.checkpoint.with_suffix(ending),
            dynamic=arguments.dynamic,
            precision=arguments.precision,
        )
    except (ValueError, OSError, ExportError, MissingPackageError) as error:
        print(f"lightning-accel export: {error}", file=sys.stderr)
        return NOT_WRITTEN
    print(exported)
    return WRITTEN
