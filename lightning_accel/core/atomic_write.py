"""Files that are written whole or not at all. Needs no torch."""

from __future__ import annotations

import os
import uuid
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Writes a file, in a folder that is made where it is missing; whole or not at all.

    What a link points to is replaced, not the link. What is no file, as ``/dev/stdout`` or a pipe, is written to.

    Raises:
        OSError: That is not possible; a file that was there is as it was.
    """
    if is_special(path):
        path.write_text(text, encoding="utf-8")
        return
    target = Path(os.path.realpath(path))
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{uuid.uuid4().hex}.tmp")  # opened as any file of the user's is, and permitted alike
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def is_special(path: Path) -> bool:
    """Whether a device, a pipe or the like is there, which a file must not be put in the place of."""
    return path.exists() and not path.is_file() and not path.is_dir()
