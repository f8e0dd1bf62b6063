"""The target file of an export, written completely or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from lightning_accel.core.atomic_write import is_special
from lightning_accel.deploy.forms import FORMS


def target_of(path: str | Path | None, form: str, precision: str) -> Path:
    """Returns the file to write; by default ``model`` in the working folder, with an ending for form and precision.

    Raises:
        OSError: The path is a folder or a device.
        ValueError: The form's library does not write this ending.
    """
    target = Path(path or default_path(Path("model"), form, precision)).expanduser().resolve()
    if target.is_dir() or str(path or "").endswith(("/", os.sep)):
        raise IsADirectoryError(f"{target} is a folder: give the path of a file.")
    if is_special(target):
        raise OSError(f"{target} is no file, and must not be replaced by one: give the path of a file.")
    ending = FORMS[form].ending
    if FORMS[form].needs_ending and target.suffix != ending:
        raise ValueError(
            f"path={str(path)!r}: form={form!r} is written to files that end in {ending!r}, "
            f"{target.with_suffix(ending).name!r} say."
        )
    return target


def default_path(checkpoint: Path, form: str, precision: str) -> Path:
    """Returns a path beside a checkpoint, unique per form and precision: ``best.pt2``, ``best.int8-dynamic.onnx``."""
    ending = FORMS[form].ending
    first = next(name for name, kind in FORMS.items() if kind.ending == ending)
    parts = ([] if form == first else [form]) + ([] if precision == "32" else [precision])
    return checkpoint.with_name("".join([checkpoint.stem, *(f".{part}" for part in parts), ending]))


def put(folder: Path, target: Path) -> int:
    """Moves the written files to their place, the main file last. Returns their total bytes."""
    written = [one for one in folder.iterdir() if one.is_file()]
    num_bytes = sum(one.stat().st_size for one in written)
    for one in sorted(written, key=lambda file: file.name == target.name):
        os.replace(one, target.with_name(one.name))
    return num_bytes
