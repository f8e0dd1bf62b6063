"""What a Trainer runs, and where: the first line of a record."""

from __future__ import annotations

import functools
import os
import platform
import re
import sys
import sysconfig
from contextlib import suppress
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from lightning_accel.core.host import Host, usable_cores
from lightning_accel.evidence.events import RunStarted
from lightning_accel.lightning.packages import Trainer
from lightning_accel.lightning.private import combined_loader
from lightning_accel.memory.meter import device_memory_bytes
from lightning_accel.settings import Plan

_INSTALLED = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))
_OF_LOADERS = ("batch_size", "num_workers", "prefetch_factor", "pin_memory", "persistent_workers")
_PACKAGES = ("torch", "lightning", "pytorch-lightning", "lightning-accel")
_SECRET = re.compile(r"key|token|secret|password|passwd|credential", re.IGNORECASE)


def header_of(trainer: Trainer, started: datetime, *, has_images: bool) -> RunStarted:
    """What a Trainer runs, and where."""
    module, device = trainer.lightning_module, trainer.strategy.root_device
    host = Host.detect(device)
    plan = getattr(trainer.precision_plugin, "plan", None)
    parameters = list(module.parameters())
    return RunStarted(
        started=started.isoformat(timespec="seconds"),
        command=_without_secrets(sys.argv),
        model=f"{type(module).__module__}.{type(module).__qualname__}",
        parameters=None if any(map(is_lazy, parameters)) else sum(one.numel() for one in parameters),
        settings=plan.to_dict() if isinstance(plan, Plan) else None,
        precision=str(trainer.precision),
        strategy=type(trainer.strategy).__name__,
        machine=host.described,
        cores=usable_cores(),
        threads=torch.get_num_threads() if device.type == "cpu" else 1,
        world_size=trainer.world_size,
        versions={"python": platform.python_version(), **_installed()},
        native_bf16=host.native_bf16,
        device_bytes=device_memory_bytes(device),
        log_every_n_steps=trainer.log_every_n_steps,  # type: ignore[attr-defined]
        accumulate_grad_batches=trainer.accumulate_grad_batches,
        loaders=[
            {name: getattr(loader, name) for name in _OF_LOADERS if isinstance(getattr(loader, name, None), int)}
            for loader in train_loaders(trainer)
        ],
        source_folders=_source_folders(),
        makes_loaders=makes_loaders(trainer),
        has_images=has_images,
    )


def train_loaders(trainer: Trainer) -> list[Any]:
    """Returns the loaders of a fit, as Lightning tells them apart: one may be a sequence of its batches."""
    combined = combined_loader(trainer.fit_loop)
    return [] if combined is None else combined.flattened


def makes_loaders(trainer: Trainer) -> bool:
    """Whether the user's own code makes the loaders of a fit.

    A library does whose data module it is, or, where there is none, whose LightningModule.
    """
    maker = getattr(trainer, "datamodule", None) or trainer.lightning_module
    file = getattr(sys.modules.get(type(maker).__module__), "__file__", None)
    return file is None or _own_folder(file) is not None


def _without_secrets(command: list[str]) -> list[str]:
    """A command line without the values of what is named like a secret."""
    shown = list(command)
    for place, word in enumerate(command):
        name, equals, _ = word.partition("=")
        if not _SECRET.search(name):
            continue
        if equals:
            shown[place] = f"{name}=…"
        elif word.startswith("-") and place + 1 < len(command):
            shown[place + 1] = "…"
    return shown


def _installed() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return {**found, "torch": str(torch.__version__)}  # with what it was built for


def _source_folders() -> list[str]:
    """Where modules come from that are neither Python's nor installed; of folders within each other the outermost."""
    # Read as it stands: to ask a module for an attribute may make it import others.
    files = {getattr(module, "__dict__", {}).get("__file__") for module in list(sys.modules.values())}
    folders = {folder for file in files if isinstance(file, str) and (folder := _own_folder(file)) is not None}
    return sorted(str(one) for one in folders if folders.isdisjoint(one.parents))


def _own_folder(file: str) -> Path | None:
    """Where ``file`` is; None: in Python's own folders, or among what is installed."""
    return None if any(name in file for name in _INSTALLED) else _outside_python(os.path.dirname(file))


@functools.cache  # of thousands of modules
def _outside_python(folder: str) -> Path | None:
    resolved = Path(folder).resolve()
    return None if resolved.is_relative_to(_python()) else resolved


@functools.cache
def _python() -> Path:
    return Path(sysconfig.get_path("stdlib")).resolve()
