"""A folder written by one process with the steps that several take one by one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning_accel.resilience.atomic_checkpoint import begin_replacing, commit, discard


@contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """A folder to write into, which replaces what is at ``path`` when the block ends, and vanishes when it raises."""
    temporary = begin_replacing(path)
    try:
        temporary.mkdir()
        yield temporary
        commit(temporary, path)
    except BaseException:
        discard(temporary)
        raise
