"""Finds the techniques that may have caused an error, from its message and from our code in its traceback."""

from __future__ import annotations

import re
import traceback

from lightning_accel.core.report import EditError
from lightning_accel.techniques.registry import declarations

_WORDS = {
    "precision": re.compile(r"dtype|scalar type|[Hh]alf|[Bb]?[Ff]loat(16|32)"),
    "memory_format": re.compile(r"view size|strides?\b|contiguous|memory.format|channels_last"),
    "inplace_activations": re.compile(r"in-?place"),
    "gradient_checkpointing": re.compile(r"recomput|checkpoint"),
    "compile": re.compile(r"[Dd]ynamo|[Ii]nductor|torch\.compile"),
    "graphs": re.compile(r"CUDA graph|captur"),
}


def suspects(error: BaseException) -> list[str]:
    """Returns the names of the techniques that may have caused an error, the likeliest first."""
    if isinstance(error, EditError):
        return [error.technique]
    named = [technique for technique, words in _WORDS.items() if words.search(str(error))]
    # Each technique is a file or a folder. A technique from outside the package has its own module.
    homes = {_home(declaration.technique.__module__): name for name, declaration in declarations().items()}
    modules = [str(frame.f_globals.get("__name__", "")) for frame, _ in traceback.walk_tb(error.__traceback__)]
    passed = [homes[home] for home in map(_home, reversed(modules)) if home in homes]
    return list(dict.fromkeys([*named, *passed]))


def _home(module: str) -> str:
    return ".".join(module.split(".")[:3])
