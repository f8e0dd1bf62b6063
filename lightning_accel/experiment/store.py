"""The cache folder: what runs keep for later ones, in JSON files that only this module opens. Needs no torch."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Generic, TypeVar

from lightning_accel.core.atomic_write import write_whole
from lightning_accel.experiment.digest import digest

Value = TypeVar("Value")
Key = Mapping[str, str]
"""All that a kept value depends on, in words."""

STORES = ("tuning", "verdicts", "searches", "allocators")
"""The names of all stores. ``lightning-accel cache`` lists and clears them."""


def cache_folder() -> Path:
    """``$LIGHTNING_ACCEL_CACHE``, by default ``$XDG_CACHE_HOME/lightning-accel`` or ``~/.cache/lightning-accel``."""
    if given := os.environ.get("LIGHTNING_ACCEL_CACHE"):
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "lightning-accel"


def kernel_folder() -> Path:
    """The folder of the kernels that torch.compile has built."""
    return cache_folder().absolute() / "kernels"


def xla_folder() -> Path:
    """The folder of the programs that XLA has compiled, with a folder for each process of a run."""
    return cache_folder().absolute() / "xla"


class DamagedError(ValueError):
    """A file in the cache folder is not whole, or another version or another key has written it."""


@dataclass(frozen=True)
class Entry(Generic[Value]):
    """A kept value, with its key and when it was written, in UTC."""

    key: Key
    written: datetime
    value: Value


class Store(Generic[Value]):
    """Values of one kind: one file for each key.

    A file is replaced whole, so processes need no lock: readers see a whole file, and the last writer's file stays.

    Args:
        name: One of :data:`STORES`.
        read: Makes a value of what JSON holds.
        version: Of what JSON holds. A file of another version counts as damaged.
    """

    def __init__(self, name: str, read: Callable[[Any], Value] = lambda found: found, version: int = 1) -> None:
        self._name, self._value_of, self._version = name, read, version

    def paths(self) -> Iterator[Path]:
        """The files of this store."""
        return (cache_folder() / self._name).glob("*.json")

    def get(self, key: Key) -> Entry[Value] | None:
        """What is kept for ``key``; None if nothing is.

        Raises:
            DamagedError: Its file cannot be used.
        """
        path = self._path(key)
        if not os.path.isfile(path):  # or its folder cannot be looked into
            return None
        entry = self._read(path)
        if entry.key != key:
            raise DamagedError(f"{path} belongs to another model or machine")
        return entry

    def put(self, key: Key, value: Any) -> None:
        """Keeps a value that JSON can hold.

        Raises:
            OSError: The folder cannot be written to.
        """
        written = datetime.now(timezone.utc).isoformat(timespec="seconds")
        content = {"version": self._version, "key": key, "written": written, "value": value}
        write_whole(self._path(key), json.dumps(content, indent=1))

    def entries(self) -> Iterator[Entry[Value] | DamagedError]:
        """All values, and what is wrong with the files that hold none."""
        for path in sorted(self.paths()):
            try:
                yield self._read(path)
            except DamagedError as error:
                yield error

    def clear(self) -> int:
        """Removes all values. Returns how many files that were."""
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
