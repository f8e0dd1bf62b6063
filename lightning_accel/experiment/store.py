"""The cache folder: values for later runs, in JSON files that only this module opens. Needs no torch."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Generic, TypeVar

from lightning_accel.core.atomic_write import write_whole
from lightning_accel.experiment.digest import digest

Value = TypeVar("Value")
Key = Mapping[str, str]
"""Everything that a stored value depends on, as text."""

STORES = ("tuning", "verdicts", "searches", "allocators")
"""The names of all stores. ``lightning-accel cache`` lists and clears them."""


def cache_folder() -> Path:
    """Returns ``$LIGHTNING_ACCEL_CACHE``, or ``$XDG_CACHE_HOME/lightning-accel`` or ``~/.cache/lightning-accel``.

    A user without a home has a folder that ends with the process.
    """
    if given := os.environ.get("LIGHTNING_ACCEL_CACHE"):
        return Path(given)
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "lightning-accel"
    try:
        return Path.home() / ".cache" / "lightning-accel"
    except RuntimeError:  # a user without a home, in a container say
        return Path(_folder_of_process().name)


@functools.cache
def _folder_of_process() -> TemporaryDirectory[str]:
    """Returns a folder that goes when the process does, so that nothing is remembered."""
    return TemporaryDirectory(prefix="lightning-accel-", ignore_cleanup_errors=True)


def kernel_folder() -> Path:
    """Returns the folder for kernels built by torch.compile."""
    return cache_folder().absolute() / "kernels"


def xla_folder() -> Path:
    """Returns the folder for programs compiled by XLA, with a subfolder for each process of a run."""
    return cache_folder().absolute() / "xla"


class DamagedError(ValueError):
    """A file in the cache folder is incomplete, or was written by another version or for another key."""


@dataclass(frozen=True)
class Entry(Generic[Value]):
    """A stored value, with its key and the time at which it was written, in UTC."""

    key: Key
    written: datetime
    value: Value


class Store(Generic[Value]):
    """Values of one kind: one file for each key.

    A file is replaced whole, so processes need no lock: readers see a whole file, and the last writer's file stays.

    Args:
        name: One of :data:`STORES`.
        read: Makes a value from JSON content.
        version: The version of the JSON content. A file of another version counts as damaged.
    """

    def __init__(self, name: str, read: Callable[[Any], Value] = lambda found: found, version: int = 1) -> None:
        self._name, self._value_of, self._version = name, read, version

    def paths(self) -> Iterator[Path]:
        """Returns the files of this store."""
        return (cache_folder() / self._name).glob("*.json")

    def get(self, key: Key) -> Entry[Value] | None:
        """Returns the value stored for ``key``, or None.

        Raises:
            DamagedError: Its file cannot be used.
        """
        path = self._path(key)
        if not os.path.isfile(path):  # also if its folder cannot be read
            return None
        entry = self._read(path)
        if entry.key != key:
            raise DamagedError(f"{path} belongs to another model or machine")
        return entry

    def put(self, key: Key, value: Any) -> None:
        """Stores a value that JSON can represent.

        Raises:
            OSError: The folder cannot be written to.
        """
        written = datetime.now(timezone.utc).isoformat(timespec="seconds")
        content = {"version": self._version, "key": key, "written": written, "value": value}
        write_whole(self._path(key), json.dumps(content, indent=1))

    def entries(self) -> Iterator[Entry[Value] | DamagedError]:
        """Yields all values, and the errors of damaged files."""
        for path in sorted(self.paths()):
            try:
                yield self._read(path)
            except DamagedError as error:
                yield error

    def clear(self) -> int:
        """Removes all values. Returns the number of files."""
        for path in (paths := list(self.paths())):
            path.unlink(missing_ok=True)
        return len(paths)

    def _path(self, key: Key) -> Path:
        return cache_folder() / self._name / f"{digest(key)}.json"

    def _read(self, path: Path) -> Entry[Value]:
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["version"] != self._version:
                raise ValueError(f"version {content['version']}, and not {self._version}")
            return Entry(content["key"], datetime.fromisoformat(content["written"]), self._value_of(content["value"]))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamagedError(f"{path} is damaged ({type(error).__name__}: {error})") from error
