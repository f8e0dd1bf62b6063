"""``tune``: a subcommand of `AccelCLI` and ``lightning-accel``, which writes its result into a configuration."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_accel.lightning.packages import LightningDataModule, LightningModule, Trainer
from lightning_accel.search.job import LOADER_SETTINGS
from lightning_accel.search.judging import Objective
from lightning_accel.search.tune import TuneResult, tune


@dataclass(frozen=True)
class TuneOptions:
    """How to tune before a run: ``tune --config config.yaml``, then ``fit --config config.yaml --config accel.yaml``.

    Attributes:
        time: How long tuning may take: ``90s``, ``3min``, ``1h``.
        objective: ``speed``: samples per second; ``memory``: one percent of memory is worth four percent of time;
            ``balanced``: one percent.
        memory_limit: The most memory that a run may hold, such as ``12GiB``; by default what the machine has.
        keep_effective_batch: Whether an optimizer step must see as many samples as before.
        out: The file that is written.
    """

    time: str = "3min"
    objective: Objective = "speed"
    memory_limit: str | int | None = None
    keep_effective_batch: bool = False
    out: str = "accel.yaml"


class TunableTrainer(Trainer):
    """A Trainer with a method for the subcommand ``tune``."""

    def tune(
        self,
        model: LightningModule,
        datamodule: LightningDataModule | None = None,
        ckpt_path: str | None = None,
        weights_only: bool | None = None,
    ) -> TuneResult:
        """Finds the settings that make the run fastest or smallest on this machine, and writes a configuration.

        Args:
            model: The module.
            datamodule: Its data; None if the module has its own ``train_dataloader``.
            ckpt_path: Not used; accepted because a configuration of ``fit`` has it.
            weights_only: Not used.
        """
        return tune(model, datamodule, self)


def with_sections(arguments: Sequence[str]) -> list[str]:
    """Returns ``tune --time 3min`` as ``tune --tuning.time 3min``."""
    names = {f"--{written}": name for name in vars(TuneOptions()) for written in (name, name.replace("_", "-"))}
    found = []
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        found.append(f"--tuning.{names[flag]}{equals}{value}" if flag in names else argument)
    return found


def places_in(config: Mapping[str, Any]) -> dict[str, list[tuple[str, ...]]]:
    """Returns where a configuration has its batch size and loader settings: name → key paths."""
    places: dict[str, list[tuple[str, ...]]] = defaultdict(list)
    for section in ("model", "data"):
        for name, path in _arguments(config.get(section), section):
            places[name].append(path)
    return places


def _arguments(section: Any, name: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    given = section.as_dict() if hasattr(section, "as_dict") else section
    if not isinstance(given, Mapping):
        return
    path = (name, "init_args") if "class_path" in given else (name,)
    arguments = given.get("init_args", {}) if "class_path" in given else given
    for argument in ("batch_size", *LOADER_SETTINGS):
        if argument in arguments:
            yield argument, (*path, argument)


def check_out(out: str) -> Path:
    """Returns the file to write.

    Raises:
        ValueError: The file cannot be written.
    """
    path = Path(out)
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise ValueError(
            f"out={out!r} cannot be written. Allowed: a file in a folder that is there and can be written to."
        )
    return path
