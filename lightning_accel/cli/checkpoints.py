"""Loads a model from a Lightning checkpoint, and example inputs from a file, for commands."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from lightning_accel.cli.users_code import CheckpointError, named, running, said_of

if TYPE_CHECKING:
    from lightning_accel.lightning.packages import LightningModule


CONFIG = "config.yaml"
"""The file in which LightningCLI saves a run's configuration."""


Checkpoint: TypeAlias = Annotated[Path, {"metavar": "CKPT"}]
ClassName: TypeAlias = Annotated[str | None, {"metavar": "MODULE:CLASS"}]


def load_model(path: Path, model: str | None) -> LightningModule:
    """Returns the module with a checkpoint's weights, on the CPU. Without ``MODULE:CLASS``, uses LightningCLI's note.

    Raises:
        CheckpointError: The class or file does not exist; the class is unknown; or the file is damaged, of another
            class, or not a checkpoint.
        OSError: The file cannot be read.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} is no file: give a checkpoint as ModelCheckpoint writes them.")
    return _by_noted_class(path) if model is None else _loaded(named(model, "--model"), f"--model {model}", path)


def _loaded(kind: Any, option: str, path: Path) -> LightningModule:
    """Loads a module of a class. Raises a CheckpointError if that is no LightningModule or does not fit the file."""
    from lightning_accel.lightning.packages import LightningModule

    if not (isinstance(kind, type) and issubclass(kind, LightningModule)):
        raise CheckpointError(f"{option} is no class of LightningModule, but {kind!r}.")
    try:
        with running(option):
            return kind.load_from_checkpoint(path, map_location="cpu")
    except CheckpointError as error:
        _check_contents(path)
        more = "its class needs arguments that are not in it: self.save_hyperparameters() in __init__ puts them there"
        if not isinstance(error.__cause__, TypeError):
            more = "it has been trained as another class, or with other code"
        raise CheckpointError(f"{path} cannot be loaded. {error} If nothing else is wrong, {more}.") from error


def _check_contents(path: Path) -> None:
    """Raises a CheckpointError if a file cannot be read or is not a Trainer's checkpoint."""
    found = _read(path, "ModelCheckpoint and Trainer.save_checkpoint write such as it takes.")
    if not isinstance(found, dict) or not {"state_dict", "pytorch-lightning_version"} <= set(found):
        has = f"with {', '.join(map(str, list(found)[:3]))}, ..." if isinstance(found, dict) and found else "of others"
        raise CheckpointError(
            f"{path} is no checkpoint of Lightning's, but a file {has}: give one that ModelCheckpoint or"
            " Trainer.save_checkpoint has written; those have the class's arguments, too."
        )


def _read(path: Path, more: str) -> Any:
    """Reads a file of torch.save. CheckpointError, with ``more``, if it has other than tensors and plain values."""
    import torch

    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # from zip, pickle or torch, depending on the file
        kind = re.search(r"GLOBAL (\S+)", str(error))
        if kind is None:
            raise CheckpointError(
                f"{path} is no file of torch.save, or is not whole ({type(error).__name__} while reading it). {more}"
            ) from error
        raise CheckpointError(
            f"{path} holds more than tensors and plain values ({kind[1]}), which could run any code when it is read."
            f" {more} A file of your own is read whole with TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1 in the environment."
        ) from error


@dataclass(frozen=True)
class Noted:
    """A class that LightningCLI has noted, chosen by ``class_path``."""

    config: Path  # the file with the note
    class_path: str  # `package.module.Class`
    section: dict[str, Any]  # its section of the file, with arguments

    def load(self, section: str) -> Any:
        """Returns the class. Raises a CheckpointError if it cannot be imported here."""
        return named(":".join(self.class_path.rpartition(".")[::2]), f"{self.config}, {section}.class_path:")


def noted(path: Path, section: str) -> Noted | None:
    """Returns the class of a section (``"model"``, ``"data"``) in config.yaml beside a checkpoint; None if absent."""
    import yaml

    for folder in (path.parent, *path.resolve().parents[1:2]):  # the parent of checkpoints/ has it
        config = folder / CONFIG
        try:
            given = yaml.safe_load(config.read_text(encoding="utf-8")) if config.is_file() else None
        except (yaml.YAMLError, UnicodeError) as error:
            raise CheckpointError(f"{config} is no YAML: {' '.join(str(error).split())}") from error
        found = given.get(section) if isinstance(given, dict) else None
        if isinstance(found, dict) and found.get("class_path"):
            return Noted(config, str(found["class_path"]), found)
    return None


def _by_noted_class(path: Path) -> LightningModule:
    """Loads a model of the class that LightningCLI has noted in the checkpoint or in config.yaml beside it.

    LightningCLI notes no class if it was given one, ``LightningCLI(Digits)``: then this raises a CheckpointError.
    """
    from lightning_accel.lightning.packages import LightningModule, classes

    if found := noted(path, "model"):
        return _loaded(found.load("model"), f"{found.config}, model.class_path: {found.class_path}", path)
    why = ""
    try:  # the class noted in it, or else the empty LightningModule, which cannot load weights
        with running(str(path)):
            loaded = LightningModule.load_from_checkpoint(path, map_location="cpu")
        if type(loaded) not in classes(LightningModule):
            return loaded
    except CheckpointError as error:
        _check_contents(path)
        why = "" if "state_dict for LightningModule:" in str(error) else f" ({said_of(error.__cause__ or error)})"
    raise CheckpointError(
        f"{path}: neither it nor a {CONFIG} beside it names its class, as LightningCLI notes one that was chosen by"
        f" class_path: --model package.module:Class.{why}"
    )


def load_example(model: LightningModule, path: Path | None, batches: list[Any] | None = None) -> Any:
    """Returns what ``forward`` takes, from a file of ``torch.save`` with an example or a batch.

    Without a file, returns the model's ``example_input_array``; without that, the inputs of the first batch.

    Raises:
        CheckpointError: There is none of the three, or the file holds something else.
        OSError: The file cannot be read.
    """
    from lightning_accel.deploy.inputs import example_in

    if path is not None:
        return example_in(model, _read(path, "--example takes what torch.save(batch, 'batch.pt') writes."))
    if model.example_input_array is not None:
        return model.example_input_array
    if batches:
        return example_in(model, batches[0])
    raise CheckpointError("No example: --example batch.pt, saved by torch.save(batch, 'batch.pt').")
