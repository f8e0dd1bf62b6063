"""What the file of a form is called where nobody says."""

from __future__ import annotations

from pathlib import Path

from lightning_accel.deploy.forms import FORMS


def default_path(checkpoint: Path, form: str, precision: str) -> Path:
    """Beside a checkpoint: ``best.pt2``, ``best.aoti.pt2``, ``best.int8-dynamic.onnx``; no two of one checkpoint alike."""
    ending = FORMS[form].ending
    first = next(name for name, kind in FORMS.items() if kind.ending == ending)
    parts = ([] if form == first else [form]) + ([] if precision == "32" else [precision])
    return checkpoint.with_name("".join([checkpoint.stem, *(f".{part}" for part in parts), ending]))
