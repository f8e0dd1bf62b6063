"""Writes files atomically: completely or not at all. Needs no torch."""

from __future__ import annotations

import os
import uuid
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Writes a file completely or not at all. Creates its folder if that is missing.

    A symbolic link stays, and its target is replaced. A device or pipe, such as ``/dev/stdout``, is written to
    directly.

    Raises:
        OSError: The file cannot be written. An existing file is unchanged.
    """
    if is_special(path):
        path.write_text(text, encoding="utf-8")
        return
    target = Path(os.path.realpath(path))
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{uuid.uuid4().hex}.tmp")  # opened as usual, for the usual permissions
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def is_special(path: Path) -> bool:
    """Returns whether ``path`` is a device, pipe or the like, which a file must not replace."""
    return path.exists() and not path.is_file() and not path.is_dir()
