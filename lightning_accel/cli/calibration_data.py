"""Calibration data for ``lightning-accel export``: the named data, otherwise the checkpoint's own."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_accel.cli import checkpoints
from lightning_accel.cli.users_code import CheckpointError, batches_of, running, said_of

if TYPE_CHECKING:
    from lightning_accel.lightning.packages import LightningDataModule, LightningModule

_SAY = "--data MODULE:FUNCTION, a function that returns a few batches such as the model will be served."


def load_batches(model: LightningModule, checkpoint: Path, data: str | None, *, needed: bool) -> list[Any] | None:
    """Returns the first batches of the named data; without a name, the checkpoint's own if they are needed.

    Raises:
        CheckpointError: Data is needed or named, and there is none.
    """
    from lightning_accel.deploy.quantizing import CALIBRATION_BATCHES
    from lightning_accel.lightning.packages import is_overridden

    if data is not None:
        return batches_of(data, "--data", at_most=CALIBRATION_BATCHES)
    if not needed:
        return None
    given = "INT8 with ranges of its own takes them from data, and"
    try:
        with running("of the run"):
            source = _noted_module(checkpoint) or (model if is_overridden("train_dataloader", model) else None)
            found = None
            if source is not None:
                source.prepare_data()
                source.setup("fit")
                found = list(islice(source.train_dataloader(), CALIBRATION_BATCHES))
    except CheckpointError as error:
        if error.__cause__ is None:
            raise
        # Any error of a data module: missing files, or no Trainer.
        why = said_of(error.__cause__)
        raise CheckpointError(f"{given} those of the run cannot be had here ({why}): {_SAY}") from error
    if found:
        return found
    if found is not None:
        raise CheckpointError(f"{given} {checkpoint}'s own gave no batches: {_SAY}")
    raise CheckpointError(f"{given} {checkpoint} names no data module, nor has the model a train_dataloader: {_SAY}")


def _noted_module(checkpoint: Path) -> LightningDataModule | None:
    """Returns the data module that LightningCLI noted beside a checkpoint or in it; None if there is none."""
    from lightning_accel.lightning.packages import LightningDataModule, classes

    if found := checkpoints.noted(checkpoint, "data"):
        from jsonargparse import ArgumentParser

        found.load("data")
        parser = ArgumentParser(exit_on_error=False)
        parser.add_subclass_arguments(classes(LightningDataModule), "data", fail_untyped=False)
        made: LightningDataModule = parser.instantiate_classes(parser.parse_object({"data": found.section})).data
        return made
    loaded = LightningDataModule.load_from_checkpoint(checkpoint, map_location="cpu")
    return None if type(loaded) in classes(LightningDataModule) else loaded
