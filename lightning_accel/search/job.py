"""The training that is tuned, to be sent to other processes, and the setups in which it is tried."""

from __future__ import annotations

import copy
import json
import pickle
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

import cloudpickle
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from lightning_accel.lightning.packages import LightningDataModule, LightningModule, Trainer
from lightning_accel.lightning.plugin import AccelPlugin
from lightning_accel.settings import Plan
from lightning_accel.techniques.mixed_precision import PrecisionSetting

LOADER_SETTINGS = ("num_workers", "persistent_workers", "prefetch_factor", "pin_memory")

_KEPT = (
    *(*LOADER_SETTINGS, "batch_size", "drop_last", "sampler", "collate_fn", "timeout"),
    *("worker_init_fn", "multiprocessing_context", "generator"),
)


@dataclass(frozen=True)
class TrialSetup:
    """Changes to a run that is about to begin."""

    batch_size: int | None = None  # samples in a batch; None: unchanged
    accumulate: int | None = None  # batches in an optimizer step; None: unchanged
    loader: Mapping[str, Any] = field(default_factory=dict)  # arguments of the training's `DataLoader`
    plan: Mapping[str, Any] = field(default_factory=dict)  # techniques of the run's `AccelPlugin`
    environment: Mapping[str, str] = field(default_factory=dict)  # variables that must be set before Python starts

    def with_(self, other: TrialSetup) -> TrialSetup:
        """Combines both changes; the other's win where both set the same."""
        return TrialSetup(
            batch_size=self.batch_size if other.batch_size is None else other.batch_size,
            accumulate=self.accumulate if other.accumulate is None else other.accumulate,
            loader={**self.loader, **other.loader},
            plan={**self.plan, **other.plan},
            environment={**self.environment, **other.environment},
        )

    @property
    def key(self) -> str:
        """Returns a text that is equal for equal setups, in every process."""
        return json.dumps(asdict(self), sort_keys=True)

    def __str__(self) -> str:
        named: dict[str, Any] = {"batch_size": self.batch_size, "accumulate_grad_batches": self.accumulate}
        given = {name: value for name, value in named.items() if value is not None}
        given |= {**self.loader, **self.plan, **self.environment}
        return ", ".join(f"{name}={value}" for name, value in given.items()) or "as it is"


@dataclass
class TuneJob:
    """A training to be tuned."""

    model: LightningModule
    # Its data module or its training loader; None if the module has its own loaders.
    data: LightningDataModule | DataLoader[Any] | None
    plan: Plan = field(default_factory=Plan)  # the settings of its `AccelPlugin`
    # The Trainer's arguments, without loggers, callbacks and checkpoints.
    options: dict[str, Any] = field(default_factory=dict)
    accumulate: int = 1  # batches to an optimizer step
    max_steps: int = -1  # of the whole run; -1: not limited
    max_epochs: int = -1  # of the whole run; -1: not limited
    has_logger: bool = False  # whether the module may use a logger
    threads: int = field(default_factory=torch.get_num_threads)  # threads of an operation on the host
    matmul_precision: str = field(default_factory=torch.get_float32_matmul_precision)  # of float32 products
    has_plugin: bool = True  # whether the original run has an `AccelPlugin`

    @classmethod
    def of(cls, model: LightningModule, data: Any, trainer: Trainer) -> TuneJob:
        """Makes the job from what ``trainer`` would do with the model and the data on one device.

        Raises:
            TypeError: The data is not of a type that can be trained on.
        """
        if not (data is None or isinstance(data, (LightningDataModule, DataLoader))):
            raise TypeError(
                f"data is of type {type(data).__name__}. Allowed: a LightningDataModule, a DataLoader, or None, where"
                " the module has a train_dataloader of its own."
            )
        plugin, device = trainer.precision_plugin, trainer.strategy.root_device
        # The plan of a run whose Trainer has another precision plugin keeps the precision if it knows that one.
        precision: Any = trainer.precision if trainer.precision in get_args(PrecisionSetting) else "32-true"
        # Lightning's default, which it sets when the run begins.
        default_epochs = 1000 if trainer.max_steps == -1 else -1
        options: dict[str, Any] = {
            "accelerator": device.type,
            "devices": 1 if device.index is None else [device.index],
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "benchmark": torch.backends.cudnn.benchmark,
            "overfit_batches": getattr(trainer, "overfit_batches", 0.0),  # an undeclared attribute
            "gradient_clip_val": trainer.gradient_clip_val,
            "gradient_clip_algorithm": trainer.gradient_clip_algorithm,
            "limit_train_batches": trainer.limit_train_batches,
        }
        return cls(
            model=model,
            data=data,
            plan=plugin.plan if isinstance(plugin, AccelPlugin) else Plan(precision=precision),
            options=options,
            accumulate=trainer.accumulate_grad_batches,
            max_steps=trainer.max_steps,
            max_epochs=default_epochs if trainer.max_epochs is None else trainer.max_epochs,
            has_logger=bool(trainer.loggers),
            has_plugin=isinstance(plugin, AccelPlugin),
        )

    @property
    def can_fork(self) -> bool:
        """Whether a process that has read the job can be forked: a process that has used a device cannot."""
        return sys.platform == "linux" and self.options.get("accelerator") == "cpu"

    # -- settings ------------------------------------------------------------------------------------------------

    @property
    def batch_size(self) -> int | None:
        """Returns the current batch size. None if there is no attribute to change it."""
        found = self._settings("batch_size").get("batch_size")
        return found if isinstance(found, int) and not isinstance(found, bool) else None

    @property
    def loader_settings(self) -> dict[str, Any]:
        """Returns the current values of the loader's settings that can be changed."""
        return self._settings(*LOADER_SETTINGS)

    def _settings(self, *names: str) -> dict[str, Any]:
        if isinstance(self.data, DataLoader):
            return {name: getattr(self.data, name) for name in names} if _can_be_remade(self.data) else {}
        holders = [holder for owner in self._owners() for holder in (dict(owner.hparams), vars(owner))]
        return {name: holder[name] for name in names for holder in holders if name in holder}

    def _owners(self) -> Iterator[LightningModule | LightningDataModule]:
        """Yields the objects whose attributes and hyperparameters configure loaders. The last one wins."""
        yield self.model
        if isinstance(self.data, LightningDataModule):
            yield self.data

    def set_up(self, setup: TrialSetup) -> None:
        """Applies a setup to the data and the plan of this copy."""
        changes = {**({} if setup.batch_size is None else {"batch_size": setup.batch_size}), **setup.loader}
        if isinstance(self.data, DataLoader):
            self.data = _remade(self.data, changes) if changes else self.data
        else:
            for owner in self._owners():
                for name, value in changes.items():
                    if name in vars(owner):
                        setattr(owner, name, value)
                    if name in owner.hparams:
                        owner.hparams[name] = value
        self.accumulate = setup.accumulate or self.accumulate
        # The run must not change by itself while it is on trial.
        trust = "checked" if self.plan.trust == "measured" else self.plan.trust
        self.plan = self.plan.replace(**{"trust": trust, "report": False, **setup.plan})

    # -- to other processes --------------------------------------------------------------------------------------

    def write(self, path: Path) -> None:
        """Writes the job for :func:`read`, by value: the reader gets its own copy.

        Raises:
            ValueError: Something in it cannot be copied.
        """
        data = self.data
        if isinstance(data, LightningDataModule):
            data = copy.copy(data)
            data.trainer = None
        try:
            # The import path comes first, as it is needed to read the rest.
            path.write_bytes(pickle.dumps(sys.path) + cloudpickle.dumps(replace(self, data=data)))
        except Exception as error:
            raise ValueError(
                f"Tuning trains copies in other processes, and this module or its data cannot be copied:"
                f" {type(error).__name__}: {error}. Take out what cannot be pickled (open files, locks, connections),"
                " or make it where it is first used."
            ) from error


def read(path: Path) -> TuneJob:
    """Reads a job that :meth:`TuneJob.write` has written."""
    with path.open("rb") as file:
        sys.path[:] = pickle.load(file)
        job: TuneJob = cloudpickle.load(file)
    return job


def _can_be_remade(loader: DataLoader[Any]) -> bool:
    has_own_batches = type(loader.batch_sampler) is BatchSampler and loader.batch_size is not None
    return type(loader) is DataLoader and has_own_batches


def _remade(loader: DataLoader[Any], changes: Mapping[str, Any]) -> DataLoader[Any]:
    """Returns a loader with some arguments changed."""
    settings = {name: getattr(loader, name) for name in _KEPT}
    if isinstance(loader.dataset, IterableDataset):
        del settings["sampler"]  # not allowed with such a dataset
    return DataLoader(loader.dataset, **{**settings, **changes})
