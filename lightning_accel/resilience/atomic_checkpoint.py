"""Checkpoints that are replaced in one step: if writing is interrupted, the previous checkpoint is still whole."""

from __future__ import annotations

import ctypes
import glob
import os
import shutil
import socket
import sys
from pathlib import Path
from typing import Any

import psutil
import torch
from typing_extensions import override

from lightning_accel.core.atomic_write import is_special
from lightning_accel.core.byte_size import format_bytes
from lightning_accel.experiment.digest import digest
from lightning_accel.lightning.packages import TorchCheckpointIO

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # constants of Linux


class AtomicCheckpointIO(TorchCheckpointIO):
    """Lightning's own, but writes a local checkpoint beside the previous one, and then replaces that.

    Lightning 2.6 holds the whole file in memory, writes it to the temporary folder and moves it. If that is another
    file system, the move is a copy *over* the previous checkpoint, and an interrupted copy destroys both. Here the disk
    of the checkpoints needs room for one more. Lightning handles paths that are not local (``s3://``).
    """

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Writes ``checkpoint`` to ``path``; links to files are followed.

        Raises:
            OSError: Writing failed, for example for lack of space. The previous file is still at ``path``.
            TypeError: ``storage_options`` were given.
        """
        protocol, is_url, local_path = str(path).rpartition("://")
        if storage_options is not None or (is_url and protocol != "file"):
            super().save_checkpoint(checkpoint, path, storage_options)
        else:
            save_atomically(checkpoint, os.path.expanduser(local_path))


def save_atomically(checkpoint: Any, path: str | Path) -> None:
    """Writes by ``torch.save`` to a local path, which keeps the previous file until the new one is on the disk.

    Special files, such as ``/dev/null``, are written directly.

    Raises:
        OSError: Writing failed. The previous file is still at ``path``.
    """
    if is_special(Path(path)):
        with open(path, "wb") as device:
            torch.save(checkpoint, device)
        return
    temporary = begin_replacing(path)
    try:
        with temporary.open("wb") as file:
            torch.save(checkpoint, file)
        commit(temporary, path)
    except BaseException as error:
        discard(temporary)
        # After a failed write, torch still writes the end of its archive, and raises the error of that instead.
        cause = _failed_write(error)
        if cause is None:
            raise
        raise _explained(cause, path) from error


def begin_replacing(path: str | Path) -> Path:
    """Returns a temporary path to write what will replace ``path``: an unused hidden name in the same folder.

    Makes the folders above ``path``, and removes files that killed processes of this host left under such names. If
    several processes write into one folder, one calls this and :func:`commit`, and sends the path to the others.
    """
    target = _target(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(target)
    return _beside(target, "tmp")


def commit(temporary: Path, path: str | Path) -> None:
    """Replaces the file or folder at ``path`` by ``temporary``, after all of that has reached the disk.

    A file is replaced in one step, on Linux also a folder. Elsewhere, and on network file systems, a folder's previous
    content is for an instant only at ``.<name>.<host>.<pid>.previous``, from where the next save restores it.

    Raises:
        OSError: ``path`` is unchanged, and ``temporary`` still exists.
    """
    target = _target(path)
    _flush(*temporary.rglob("*"), temporary)
    left = temporary
    if target.exists() and (temporary.is_dir() or target.is_dir()):
        left = _swap(temporary, target)
    else:
        temporary.replace(target)
    _flush(target.parent)
    discard(left)  # the previous folder; nothing is left if a file was replaced


def discard(temporary: Path) -> None:
    """Removes a temporary file or folder that will not replace anything, as far as possible."""
    if temporary.is_dir():
        shutil.rmtree(temporary, ignore_errors=True)
    else:
        temporary.unlink(missing_ok=True)


def _target(path: str | Path) -> Path:
    """Resolves links: the file behind a link is replaced, not the link."""
    return Path(os.path.realpath(path))


def _beside(target: Path, suffix: str) -> Path:
    return target.with_name(f"{_prefix(target)}{os.getpid()}.{suffix}")


def _prefix(target: Path) -> str:
    # Includes the host, since processes of other hosts cannot be checked. A name has at most 255 bytes.
    name = target.name if len(target.name.encode()) <= 100 else digest(target.name)
    return f".{name}.{socket.gethostname()}."


def _remove_leftovers(target: Path) -> None:
    prefix = _prefix(target)
    for name in glob.glob(glob.escape(prefix) + "*", root_dir=target.parent):
        pid, _, suffix = name.removeprefix(prefix).partition(".")
        if suffix not in ("tmp", "previous") or not pid.isdigit():
            continue
        if int(pid) != os.getpid() and psutil.pid_exists(int(pid)):
            continue
        leftover = target.with_name(name)
        if suffix == "previous" and not target.exists():
            leftover.rename(target)
        else:
            discard(leftover)


def _swap(temporary: Path, target: Path) -> Path:
    """Moves ``temporary`` to ``target``; returns the new path of the previous content."""
    if _exchange(temporary, target):
        return temporary
    previous = target.rename(_beside(target, "previous"))
    try:
        temporary.rename(target)
    except BaseException:
        previous.rename(target)
        raise
    return previous


def _exchange(one: Path, other: Path) -> bool:
    """Exchanges two names in one step; returns False if the system cannot."""
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None) if sys.platform == "linux" else None
    if renameat2 is None:
        return False
    failed: int = renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE)
    return not failed


def _flush(*paths: Path) -> None:
    """Waits until these files, and the names in these folders, are on the disk."""
    for path in paths:
        if os.name == "nt" and path.is_dir():
            continue  # Windows cannot open folders
        descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _failed_write(error: BaseException | None) -> OSError | None:
    """Finds the failed write among ``error`` and its causes. Only errors from opening a file have a file name."""
    while error is not None and not (isinstance(error, OSError) and error.filename is None):
        error = error.__cause__ or error.__context__
    return error


def _explained(error: OSError, path: str | Path) -> OSError:
    target = _target(path)
    free = format_bytes(shutil.disk_usage(target.parent).free)
    previous = "the previous checkpoint is whole" if target.exists() else "there was none before"
    message = f"{error.strerror}: the checkpoint was not written ({free} free there), {previous}"
    return OSError(error.errno, message, str(path))
