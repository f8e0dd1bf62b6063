"""The caches of settled live trials and of trial verdicts, for later runs on the same machine.

Settled live trials hold for the same model, and are audited again. A trial compares numbers on the user's own first
batch, and its verdict holds for this case. So it is reused only if nothing that it depends on has changed: the source
of the program and of the model's classes, the command line, the shapes of the model's parameters and the other contents
of its modules (:mod:`~lightning_accel.tuning.model_fingerprint`), the first batch's shapes, the plan, the machine, the
versions, the number of threads. Otherwise, and if one of these is unknown, the trial runs again; so do failed and
week-old ones.
"""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lightning_accel.core.package_version import own_version
from lightning_accel.core.tree import tensors_in
from lightning_accel.experiment.digest import digest
from lightning_accel.experiment.store import DamagedError, Key, Store
from lightning_accel.techniques.arms import Arm
from lightning_accel.techniques.technique_context import Verdict, Verdicts
from lightning_accel.tuning.model_fingerprint import described
from lightning_accel.tuning.tuning_result import Tuning

TUNINGS = Store("tuning", lambda found: replace(Tuning.from_dict(found), is_earlier=True))
"""The settled trials, by :func:`run_key`."""

GOOD_FOR = timedelta(days=7)


@dataclass(frozen=True)
class Known:
    """Verdicts of an earlier run."""

    decisions: dict[str, Verdicts]  # of each technique, site by site
    tuning: Tuning | None  # the settled results of live trials; None if there were none
    written: datetime  # the time at which they were stored, in UTC


def program_key(model: nn.Module, batch: Any, host: str, settings: str, held: str | None = None) -> Key | None:
    """Returns the key of the program that will train ``model`` on ``batch``. None if the program is not identifiable.

    Args:
        model: The model before its first step.
        batch: The first batch.
        host: A description of the machine.
        settings: The settings as text.
        held: The result of :func:`~lightning_accel.tuning.model_fingerprint.described` before the first step of the
            model. None if that step is still to come.
    """
    try:
        source = _source(model)
        if source is None or any(map(is_lazy, model.parameters())):
            return None
        switches = (
            torch.get_num_threads(),
            torch.get_float32_matmul_precision(),
            torch.are_deterministic_algorithms_enabled(),
            str(torch.get_default_dtype()),
        )
        return {
            **run_key(model, batch, host),
            "batch": repr([(tuple(t.shape), str(t.dtype)) for t in tensors_in(batch) if not t.is_nested]),
            "modules": described(model) if held is None else held,
            "source": source,
            "settings": digest(settings, switches, sys.argv, _installed()),
        }
    except Exception:  # objects of other libraries may raise, but a cache must not end a run
        return None


def run_key(model: nn.Module, batch: Any, host: str, arms: Sequence[Arm] = ()) -> dict[str, str]:
    """Returns the key of a run: parameters, batch shapes up to the next power of two, machine, versions, arms."""
    shapes = [[(size - 1).bit_length() for size in t.shape] for t in tensors_in(batch) if not t.is_nested]
    return {
        "model": f"{type(model).__qualname__} {digest(parameters_of(model))}",
        "batch": repr(shapes),
        "host": host,
        "versions": f"torch {torch.__version__}, {own_version()}",
        "arms": ", ".join(sorted(f"{arm.name}={'|'.join(arm.choices)}" for arm in arms)),
    }


def parameters_of(model: nn.Module) -> list[tuple[Any, ...]]:
    """Returns the parameters' names, shapes, dtypes and whether each needs a gradient."""
    return [(name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in model.named_parameters()]


def _read(found: Mapping[str, Any]) -> tuple[dict[str, Verdicts], Tuning | None]:
    decisions = {
        technique: {site: Verdict.from_dict(verdict) for site, verdict in verdicts.items()}
        for technique, verdicts in found["decisions"].items()
    }
    tuning = None if found["tuning"] is None else Tuning.from_dict({**found["tuning"], "is_earlier": True})
    return decisions, tuning


VERDICTS = Store("verdicts", _read)
"""The verdicts, by :func:`program_key`."""


def recall(program: Key) -> Known | None:
    """Returns the usable verdicts of an earlier run of ``program``, or None."""
    try:
        entry = VERDICTS.get(program)
    except DamagedError:
        return None
    if entry is None or datetime.now(timezone.utc) - entry.written > GOOD_FOR:
        return None
    return Known(*entry.value, entry.written)


def remember(program: Key, decisions: Mapping[str, Verdicts], tuning: Tuning | None = None) -> None:
    """Stores the verdicts of trials, except those of techniques with incomplete trials: another run may complete them.

    Raises:
        OSError: The folder cannot be written to.
    """
    known = ("kept", "refused")
    sound = {name: found for name, found in decisions.items() if all(one.kind in known for one in found.values())}
    content = {
        "decisions": {name: {site: v.to_dict() for site, v in verdicts.items()} for name, verdicts in sound.items()},
        "tuning": None if tuning is None else tuning.to_dict(),
    }
    VERDICTS.put(program, content)


def _source(model: nn.Module) -> str | None:
    """Returns a digest of all files of the program, without libraries, and of the files of the model's classes."""
    classes = {kind for module in model.modules() for kind in type(module).__mro__ if kind is not object}
    names = {kind.__module__ for kind in classes if not kind.__module__.startswith("torch.")}
    files = [_file_of(sys.modules.get(name)) for name in names]
    if None in files:  # written at a prompt or in a notebook
        return None
    loaded = {file for module in list(sys.modules.values()) if (file := _file_of(module)) is not None}
    # The files of some torch modules do not exist.
    own = [file for file in loaded if not _is_a_librarys(file) and os.path.isfile(file)]
    try:
        stats = [(file, os.stat(file)) for file in sorted({*filter(None, files), *own})]
        return digest(*(_content(file, said.st_mtime_ns, said.st_size, said.st_ino) for file, said in stats))
    except OSError:
        return None


@functools.cache
def _content(file: str, mtime_ns: int, size: int, inode: int) -> str:
    """Returns a digest of a file's content. The cache makes it read the file again only after a change."""
    return digest(Path(file).read_bytes())


def _file_of(module: Any) -> str | None:
    """Returns the file of a module without running its code, since some modules load lazily on the first access."""
    try:
        # Most are plain modules, whose attribute access runs no code and takes a third of the time.
        held = module.__dict__ if type(module) is ModuleType else object.__getattribute__(module, "__dict__")
        file = held.get("__file__")
    except AttributeError:  # ``sys.modules`` may contain any object
        return None
    return file if isinstance(file, str) else None


def _installed() -> list[str]:
    """Returns the folder names of all distributions, with versions. To read the folders would take longer."""
    found = []
    for folder_of_modules in {entry or os.curdir for entry in sys.path}:
        if os.path.isdir(folder_of_modules):
            found += [name for name in os.listdir(folder_of_modules) if name.endswith((".dist-info", ".egg-info"))]
    return sorted(found)


_LIBRARIES = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), str(Path(__file__).parents[1]))


@functools.cache
def _is_a_librarys(file: str) -> bool:
    """Returns whether a file belongs to a library, whose version identifies the content."""
    return file.startswith(_LIBRARIES) or "site-packages" in file or "dist-packages" in file
