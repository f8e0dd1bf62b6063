"""TraceML (``pip install traceml-ai``), where it is installed: a script run under it, and what it found."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

MISSING = (
    "TraceML is not installed: pip install 'traceml-ai==0.5.*', here or into a folder of its own that PYTHONPATH names"
)
_SECTIONS = ("step_time", "step_memory", "process", "system")


def installed() -> str:
    """Its version; empty: it is not installed."""
    if find_spec("traceml_ai") is None:
        return ""
    try:
        return version("traceml-ai")
    except PackageNotFoundError:
        return "?"


def command(script: Path, arguments: Sequence[str], folder: Path, name: str) -> list[str]:
    """What runs a script under it, with its logs in ``folder / name``, which must be new."""
    launcher = [sys.executable, "-m", "traceml_ai.launcher.cli", "run", "--mode", "summary"]
    return [*launcher, "--logs-dir", str(folder), "--run-name", name, str(script), "--args", *arguments]


def findings(script: Path, arguments: Sequence[str], folder: Path, name: str) -> list[str]:
    """Runs a script under it: its names for what it found, its verdict first.

    Raises:
        RuntimeError: It did not end as it should.
    """
    done = subprocess.run(command(script, arguments, folder, name), capture_output=True, text=True, check=False)
    summary = folder / name / "final_summary.json"
    if done.returncode or not summary.exists():
        raise RuntimeError(f"traceml run {script} failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return list(dict.fromkeys(_kinds(json.loads(summary.read_text(encoding="utf-8")))))


def _kinds(summary: Any) -> Iterator[str]:
    issues = [issue for section in _SECTIONS for issue in summary[section]["issues"]]
    for one in (summary["primary_diagnosis"], *issues):
        if one["severity"] != "info":
            yield str(one["kind"])
