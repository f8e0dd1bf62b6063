"""A model out of a Lightning checkpoint, for commands; and what it is called with, out of a file."""

from __future__ import annotations

import argparse
import importlib
import sys
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Noted:
    """A class as LightningCLI notes one that was chosen by ``class_path``.

    Attributes:
        config: The file that says so.
        class_path: ``package.module.Class``.
        section: What the file says of it, arguments and all.
    """

    config: Path
    class_path: str
    section: dict[str, Any]

    def load(self, section: str) -> Any:
        """The class.

        Raises:
            CheckpointError: It cannot be imported here.
        """
        return named(":".join(self.class_path.rpartition(".")[::2]), f"{self.config}, {section}.class_path:")


def noted(path: Path, section: str) -> Noted | None:
    """The class of a section (``"model"``, ``"data"``) in config.yaml beside a checkpoint; None: it has none."""
    import yaml

    for folder in (path.parent, *path.resolve().parents[1:2]):  # checkpoints/ lies in the folder that has it
        config = folder / CONFIG
        given = yaml.safe_load(config.read_text(encoding="utf-8")) if config.is_file() else None
        found = given.get(section) if isinstance(given, dict) else None
        if isinstance(found, dict) and found.get("class_path"):
            return Noted(config, str(found["class_path"]), found)
    return None


def _by_noted_class(path: Path) -> LightningModule:
    """Of the class that LightningCLI has noted in the checkpoint, or in config.yaml beside it.

    Raises:
        CheckpointError: It has not: it was told a class of its own (``LightningCLI(Digits)``), or was not used.
    """
    from lightning.pytorch import LightningModule

    from lightning_accel.core.trial import one_line

    if found := noted(path, "model"):
        of_config: LightningModule = found.load("model").load_from_checkpoint(path, map_location="cpu")
        return of_config
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


def load_example(model: LightningModule, path: Path | None, batches: list[Any] | None = None) -> Any:
    """What ``forward`` takes, out of a file of ``torch.save`` with an example or a batch.

    Args:
        model: Whose ``example_input_array`` it is where there is no file.
        path: Of the file.
        batches: Of which the first has it where there is neither.

    Raises:
        CheckpointError: There is none of the three.
        OSError: The file cannot be read.
    """
    import torch

    from lightning_accel.deploy.inputs import example_in

    if path is not None:
        return example_in(model, torch.load(path, map_location="cpu", weights_only=True))
    if model.example_input_array is not None:
        return model.example_input_array
    if batches:
        return example_in(model, batches[0])
    raise CheckpointError("No example: --example batch.pt, saved by torch.save(batch, 'batch.pt').")
