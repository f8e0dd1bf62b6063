"""A model out of a Lightning checkpoint, for commands; and what it is called with, out of a file."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule


CONFIG = "config.yaml"
"""As LightningCLI saves what a run was given."""


class CheckpointError(ValueError):
    """A checkpoint or an example that a command cannot do with; the message says what it takes."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what names a model to a parser."""
    parser.add_argument("checkpoint", type=Path, metavar="CKPT", help="a Lightning checkpoint, one file")
    parser.add_argument(
        "--model",
        metavar="MODULE:CLASS",
        help="the LightningModule, such as train:Digits for a class in train.py; it has saved its hyperparameters"
        " (default: the class that LightningCLI has noted in the checkpoint or in config.yaml beside it)",
    )


def load_model(path: Path, model: str | None) -> LightningModule:
    """The module with a checkpoint's weights, on the CPU.

    Args:
        path: Of the checkpoint.
        model: ``MODULE:CLASS``; None: as LightningCLI has noted it.

    Raises:
        CheckpointError: There is no such class, or no such file; or nothing says which class it is.
        OSError: It cannot be read.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} is no file: give a checkpoint as ModelCheckpoint writes them.")
    if model is None:
        return _by_noted_class(path)
    loaded: LightningModule = named(model, "--model").load_from_checkpoint(path, map_location="cpu")
    return loaded


def _by_noted_class(path: Path) -> LightningModule:
    """As LightningCLI notes a class that was chosen by ``class_path``: in the checkpoint, or in config.yaml beside it.

    Raises:
        CheckpointError: It has not: it was told a class of its own (``LightningCLI(Digits)``), or was not used.
    """
    import yaml
    from lightning.pytorch import LightningModule

    from lightning_accel.core.trial import one_line

    for folder in (path.parent, *path.resolve().parents[1:2]):  # checkpoints/ lies in the folder that has it
        config = folder / CONFIG
        given = yaml.safe_load(config.read_text(encoding="utf-8")) if config.is_file() else None
        section = given.get("model") if isinstance(given, dict) else None
        if isinstance(section, dict) and (found := section.get("class_path")):
            noted = named(":".join(str(found).rpartition(".")[::2]), f"{config}, model.class_path:")
            loaded: LightningModule = noted.load_from_checkpoint(path, map_location="cpu")
            return loaded
    why = ""
    try:  # of the class that is noted in it, else the empty LightningModule, into which no weights go
        loaded = LightningModule.load_from_checkpoint(path, map_location="cpu")
        if type(loaded) is not LightningModule:
            return loaded
    except Exception as error:
        why = "" if "state_dict for LightningModule:" in str(error) else f" ({one_line(error)})"
    raise CheckpointError(
        f"{path}: neither it nor a {CONFIG} beside it names its class, as LightningCLI notes one that was chosen by"
        f" class_path: --model package.module:Class.{why}"
    )


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
