"""``lightning-accel export CKPT --form onnx --precision int8-dynamic``: exports a checkpoint for serving."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from lightning_accel.cli import calibration_data, checkpoints
from lightning_accel.cli.users_code import CheckpointError
from lightning_accel.deploy.combinations import HOLDS, NUMBERS, check_held

EPILOG = "precisions of each form: " + "; ".join(f"{form}: {', '.join(held)}" for form, held in HOLDS.items())


def export_checkpoint(
    checkpoint: checkpoints.Checkpoint,
    *,
    model: checkpoints.ClassName = None,
    form: Annotated[Any, {"help": f"{', '.join(HOLDS)} (default: pt2)"}] = "pt2",
    example: Annotated[Path | None, {"metavar": "FILE"}] = None,
    out: Annotated[Path | None, {"metavar": "FILE"}] = None,
    precision: Annotated[
        Any, {"help": f"{', '.join(NUMBERS)}, where the form is written with it (default: 32)"}
    ] = "32",
    data: Annotated[str | None, {"metavar": "MODULE:FUNCTION"}] = None,
    dynamic: Any = "auto",
) -> int:
    """Exports the model of a checkpoint, and checks that the file computes the same at several sizes.

    The status is 0; 2 where nothing was written; 130 where Ctrl-C and 143 where SIGTERM has stopped it.

    Args:
        checkpoint: a Lightning checkpoint, one file
        model: the LightningModule, such as train:Digits for a class in train.py; it has saved its hyperparameters
            (default: the class that LightningCLI has noted in the checkpoint or in config.yaml beside it)
        form: see above
        example: what the model takes, or a batch, by torch.save (default: its example_input_array, or the first of the
            data)
        out: where to (default: beside the checkpoint, as best.onnx, best.aoti.pt2, best.fp16.onnx)
        precision: see above
        data: a function that returns batches, by which smaller numbers are calibrated and tried (default, for
            int8-static alone: the training batches of the data module that LightningCLI has noted, or of the model)
        dynamic: dimensions of any size: auto, batch, batch+sequence or off (default: auto, what the model lets)
    """
    # late: --help answers without torch
    from lightning_accel.deploy import export, quantize
    from lightning_accel.deploy.destination import default_path

    check_held(form, precision)
    target = (out or default_path(checkpoint, form, precision)).expanduser()
    names = [name.partition(":")[0].replace(".", "/") for name in (model, data) if name]
    read = [checkpoint, example, *(Path(f"{name}.py") for name in names)]
    _check_apart([target, target.with_suffix(".bin")] if form == "openvino" else [target], read)
    module = checkpoints.load_model(checkpoint, model)
    batches = calibration_data.load_batches(module, checkpoint, data, needed=precision == "int8-static")
    given = checkpoints.load_example(module, example, batches)
    made = module if precision == "32" else quantize(module, precision, calibration=batches)
    exported = export(made, given, form, path=target, dynamic=dynamic)
    if made is not module:
        print(made)
    print(exported)
    return 0


def _check_apart(written: list[Path], read: list[Path | None]) -> None:
    """Raises a CheckpointError if an output would replace an input, by any name or link."""
    for one in written:
        for other in read:
            if other is not None and one.exists() and other.exists() and one.samefile(other):
                raise CheckpointError(f"{one} would replace {other}, which is read: give --out another file.")
