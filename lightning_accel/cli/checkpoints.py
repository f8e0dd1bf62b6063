"""A model out of a Lightning checkpoint, for commands; and what it is called with, out of a file."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule


class CheckpointError(ValueError):
    """A checkpoint or an example that a command cannot do with; the message says what it takes."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what names a model to a parser."""
    parser.add_argument("checkpoint", type=Path, metavar="CKPT", help="a Lightning checkpoint, one file")
    parser.add_argument(
        "--model",
        required=True,
        metavar="MODULE:CLASS",
        help="the LightningModule, such as train:Digits for a class in train.py; it has saved its hyperparameters",
    )


def load_model(path: Path, model: str) -> LightningModule:
    """The module with a checkpoint's weights, on the CPU.

    Raises:
        CheckpointError: There is no such class, or no such file.
        OSError: It cannot be read.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} is no file: give a checkpoint as ModelCheckpoint writes them.")
    loaded: LightningModule = named(model, "--model").load_from_checkpoint(path, map_location="cpu")
    return loaded


def named(name: str, option: str) -> Any:
    """What ``MODULE:NAME`` names, in a module that is installed or lies in the working folder.

    Raises:
        CheckpointError: There is no such thing.
    """
    module, _, attribute = name.partition(":")
    sys.path.insert(0, "")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise CheckpointError(f"{option} {name}: {error}. Write package.module:Name.") from error
    finally:
        sys.path.remove("")


def load_example(model: LightningModule, path: Path | None) -> Any:
    """What ``forward`` takes, out of a file of ``torch.save`` with an example or a batch.

    Raises:
        CheckpointError: There is neither a file nor an ``example_input_array``.
        OSError: The file cannot be read.
    """
    import torch

    from lightning_accel.deploy.inputs import example_in

    if path is not None:
        return example_in(model, torch.load(path, map_location="cpu", weights_only=True))
    if model.example_input_array is None:
        raise CheckpointError("No example: --example batch.pt, saved by torch.save(batch, 'batch.pt').")
    return model.example_input_array
