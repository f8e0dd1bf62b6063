"""What the trials of the parts have found, kept for later runs of the very same program on the same machine.

A trial of a part compares numbers on the user's own first batch, and its verdict holds for what was tried. So it is
used again only where nothing that it hangs on has changed: the source of the program and of the model's classes, the
command line, the shapes of the model's parameters and what else its modules hold
(:mod:`~lightning_accel.tuning.model_fingerprint`), the first batch's shapes, the plan, the machine, the versions, the
number of threads. Anything else, and what cannot be told, is tried again; so is what failed or is older than a week.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lightning_accel.core.atomic_write import write_whole
from lightning_accel.core.cache import digest, folder
from lightning_accel.core.tree import tensors_in
from lightning_accel.techniques.technique_context import Verdict, Verdicts
from lightning_accel.tuning.model_fingerprint import described
from lightning_accel.tuning.tuning_cache import Key
from lightning_accel.tuning.tuning_result import Tuning

GOOD_FOR = timedelta(days=7)


@dataclass(frozen=True)
class Known:
    """Verdicts of an earlier run.

    Attributes:
        decisions: Of each technique, site by site.
        written: When, in UTC.
        tuning: What live trials had settled; None: they had not.
    """

    decisions: dict[str, Verdicts]
    written: datetime
    tuning: Tuning | None = None


@dataclass(frozen=True)
class Program:
    """All that a trial's verdict hangs on, in digests.

    Attributes:
        key: As of whole runs: the model's class and parameters, the machine, the versions.
        batch: The shapes and dtypes of the first batch.
        model: What every module holds beside its parameters.
        source: The files of the program and of the model's classes.
        settings: The plan, torch's own switches, the command line, the versions of all that is installed.
    """

    key: Key
    batch: str
    model: str
    source: str
    settings: str

    @classmethod
    def of(cls, model: nn.Module, batch: Any, host: str, settings: str, held: str | None = None) -> Program | None:
        """The program that is about to train ``model`` on ``batch``; None where it cannot be told from another one.

        Args:
            model: As it is before its first step.
            batch: The first.
            host: In words.
            settings: In words.
            held: What :func:`~lightning_accel.tuning.model_fingerprint.described` said before its first step,
                where that is over; None: it is not.
        """
        try:
            return cls._of(model, batch, host, settings, held)
        except Exception:  # of objects of any library's: no run is to end for what is to spare it a trial
            return None

    @classmethod
    def _of(cls, model: nn.Module, batch: Any, host: str, settings: str, held: str | None) -> Program | None:
        source = _source(model)
        if source is None or any(map(is_lazy, model.parameters())):
            return None
        tensors = [(tuple(t.shape), str(t.dtype)) for t in tensors_in(batch) if not t.is_nested]
        switches = (
            torch.get_num_threads(),
            torch.get_float32_matmul_precision(),
            torch.are_deterministic_algorithms_enabled(),
            str(torch.get_default_dtype()),
        )
        return cls(
            Key.of(model, batch, host, ()),
            repr(tensors),
            described(model) if held is None else held,
            source,
            digest((settings, switches, sys.argv, _installed())),
        )

    @property
    def path(self) -> Path:
        """Where its verdicts are kept."""
        return _folder() / f"{digest(self)}.json"


def _folder() -> Path:
    return folder() / "verdicts"


def are_kept() -> bool:
    """Whether there are any, of whatever program."""
    return _folder().is_dir() and next(_folder().iterdir(), None) is not None


def recall(program: Program) -> Known | None:
    """What the trials of an earlier run of ``program`` have found; None where there is nothing, or nothing legible."""
    try:
        content = json.loads(program.path.read_text(encoding="utf-8"))
        written = datetime.fromisoformat(content["written"])
        if datetime.now(timezone.utc) - written > GOOD_FOR:
            return None
        decisions = {
            technique: {where: Verdict.from_dict(verdict) for where, verdict in verdicts.items()}
            for technique, verdicts in content["decisions"].items()
        }
        tuning = None if content["tuning"] is None else Tuning.from_dict(content["tuning"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    if tuning is not None:
        tuning.is_earlier = True
    return Known(decisions, written, tuning)


def remember(program: Program, decisions: Mapping[str, Verdicts], tuning: Tuning | None = None) -> None:
    """Keeps what the trials have found, without what they could not find out: another run may.

    Raises:
        OSError: The folder cannot be written to.
    """
    known = ("kept", "refused")
    sound = {name: found for name, found in decisions.items() if all(one.kind in known for one in found.values())}
    content = {
        "written": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "decisions": {name: {site: v.to_dict() for site, v in verdicts.items()} for name, verdicts in sound.items()},
        "tuning": None if tuning is None else tuning.to_dict(),
    }
    write_whole(program.path, json.dumps(content, indent=1))


def _source(model: nn.Module) -> str | None:
    """A digest of every file of the program, libraries left out, and of the files of the model's classes."""
    classes = {kind for module in model.modules() for kind in type(module).__mro__ if kind is not object}
    names = {kind.__module__ for kind in classes if not kind.__module__.startswith("torch.")}
    files = [_file_of(sys.modules.get(name)) for name in names]
    if None in files:  # written at a prompt, in a notebook
        return None
    loaded = {file for module in list(sys.modules.values()) if (file := _file_of(module)) is not None}
    # Some of torch's only pretend to have a file.
    own = [file for file in loaded if not _is_a_librarys(file) and os.path.isfile(file)]
    digest = hashlib.sha256()
    for file in sorted({*filter(None, files), *own}):
        try:
            said = os.stat(file)
            digest.update(_content(file, said.st_mtime_ns, said.st_size, said.st_ino))
        except OSError:
            return None
    return digest.hexdigest()[:16]


@functools.cache
def _content(file: str, mtime_ns: int, size: int, inode: int) -> bytes:
    """A digest of what is in ``file``, which is read again only where it has been written to."""
    return hashlib.sha256(Path(file).read_bytes()).digest()


def _file_of(module: Any) -> str | None:
    """Where it was loaded from, without running any code of it: some are not loaded before they are looked at."""
    try:
        # Of a plain module, as most are, the attribute itself runs none, in a third of the time.
        held = module.__dict__ if type(module) is ModuleType else object.__getattribute__(module, "__dict__")
        file = held.get("__file__")
    except AttributeError:  # anything can be put among the modules
        return None
    return file if isinstance(file, str) else None


def _installed() -> list[str]:
    """Every distribution there is, with its version, by the folders that say so: to read them would take longer."""
    found = []
    for folder_of_modules in {entry or os.curdir for entry in sys.path}:
        if os.path.isdir(folder_of_modules):
            found += [name for name in os.listdir(folder_of_modules) if name.endswith((".dist-info", ".egg-info"))]
    return sorted(found)


_LIBRARIES = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), str(Path(__file__).parents[1]))


@functools.cache
def _is_a_librarys(file: str) -> bool:
    """Whether its version, which is known otherwise, tells what is in a file."""
    return file.startswith(_LIBRARIES) or "site-packages" in file or "dist-packages" in file
