"""What live trials have settled, kept in the user's cache folder for later runs of the same model on the same machine.

One small JSON file each, in ``$LIGHTNING_ACCEL_CACHE``, by default ``$XDG_CACHE_HOME/lightning-accel`` or
``~/.cache/lightning-accel``. Its name is a digest of all that the decisions hang on: the model's class and parameters,
the shapes of its batches, the machine, the versions of torch and of this package, and the arms that there are.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_accel.core import cache, kernel_cache
from lightning_accel.core.atomic_write import write_whole
from lightning_accel.core.cache import digest, folder
from lightning_accel.core.package_version import own_version
from lightning_accel.core.tree import tensors_in
from lightning_accel.techniques.arms import Arm
from lightning_accel.tuning.tuning_result import Tuning


@dataclass(frozen=True)
class Key:
    """What decisions hang on.

    Attributes:
        model: Its class, and a digest of its parameters' names, shapes and dtypes.
        batch: The shapes of a batch, to the next power of two.
        host: The machine, in words.
        versions: Of torch and this package.
        arms: What could be decided.
    """

    model: str
    batch: str
    host: str
    versions: str
    arms: str

    @classmethod
    def of(cls, model: nn.Module, batch: Any, host: str, arms: Sequence[Arm]) -> Key:
        parameters = [(name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in model.named_parameters()]
        shapes = [[(size - 1).bit_length() for size in t.shape] for t in tensors_in(batch) if not t.is_nested]
        return cls(
            model=f"{type(model).__qualname__} {digest(parameters)}",
            batch=repr(shapes),
            host=host,
            versions=f"torch {torch.__version__}, {own_version()}",
            arms=", ".join(sorted(f"{arm.name}={'|'.join(arm.choices)}" for arm in arms)),
        )

    @property
    def file_name(self) -> str:
        return f"{digest(self)}.json"


@dataclass(frozen=True)
class Entry:
    """One remembered run.

    Attributes:
        path: Its file.
        key: As :class:`Key` has it.
        written: When, in UTC.
        tuning: What was settled.
    """

    path: Path
    key: Mapping[str, str]
    written: str
    tuning: Tuning


class DamagedError(ValueError):
    """A file in the cache folder that is none of ours, or not whole."""


def searches() -> Path:
    """Where searches before a run keep what they have found out, a file each."""
    return folder() / "searches"


def recall(key: Key) -> Tuning | None:
    """What was settled for ``key``, as an earlier run's; None where nothing was.

    Raises:
        DamagedError: There is a file for it that cannot be read, or is another's.
    """
    path = folder() / key.file_name
    if not path.is_file():
        return None
    entry = _read(path)
    if dict(entry.key) != vars(key):
        raise DamagedError(f"{path} belongs to another model or machine")
    return replace(entry.tuning, is_earlier=True)


def remember(key: Key, tuning: Tuning) -> None:
    """Keeps what was settled; whole or not at all.

    Raises:
        OSError: The folder cannot be written to.
    """
    written = datetime.now(timezone.utc).isoformat(timespec="seconds")
    text = json.dumps({"key": vars(key), "written": written, "tuning": tuning.to_dict()}, indent=1)
    write_whole(folder() / key.file_name, text)


def entries() -> Iterator[Entry | DamagedError]:
    """Everything in the folder, and what is wrong with the rest of it."""
    for path in sorted(folder().glob("*.json")):
        try:
            yield _read(path)
        except DamagedError as error:
            yield error


def clear() -> int:
    """Removes all that is remembered, of searches before a run, too, compiled kernels and XLA's programs.

    Returns:
        How many files that were, kernels and programs left out.
    """
    kernel_cache.clear()
    shutil.rmtree(cache.xla_programs(), ignore_errors=True)
    paths = list(folder().rglob("*.json"))
    for path in paths:
        path.unlink(missing_ok=True)
    return len(paths)


def _read(path: Path) -> Entry:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return Entry(path, content["key"], content["written"], Tuning.from_dict(content["tuning"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"{path} is damaged ({type(error).__name__}: {error})") from error
