"""What torch_xla is asked: whether it is here, what it has compiled, where it keeps programs, to end a step.

It is imported when it is asked: that starts its runtime. Its names here are public ones.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from pathlib import Path
from typing import Any

import torch

CACHE_VARIABLE = "XLA_PERSISTENT_CACHE_PATH"


def why_missing() -> str:
    """Why torch_xla cannot be used here, with the mend; empty: it can."""
    if importlib.util.find_spec("torch_xla") is None:
        return (
            "torch_xla is not installed: pip install torch_xla==X, where X is your torch's release (on PyPI there is"
            " 2.9, for torch 2.9)"
        )
    try:
        importlib.import_module("torch_xla")
    except Exception as error:  # whatever a library says that was built for another one
        return (
            f"torch_xla cannot be imported ({type(error).__name__}: {error}). It is built for one release of torch, and"
            f" this is torch {torch.__version__}: install the two of the same number"
        )
    return ""


def end_step() -> None:
    """Has XLA compile and run what was recorded so far, without waiting for it."""
    importlib.import_module("torch_xla").sync()


def programs_compiled() -> int:
    """How many programs this process has compiled; those found in a cache do not count."""
    return int(_metrics().counter_value("UncachedCompile") or 0)


def compiling_s() -> float:
    """Seconds that compiling has taken in this process."""
    found = _metrics().metric_data("CompileTime")
    return 0.0 if found is None else float(found[1]) / 1e9


def keep_programs(folder: Path) -> str:
    """Has compiled programs kept in a folder, for later runs, unless the user has named one by the variable.

    Nothing can be changed about it once this process has compiled a program.

    Each process has a folder within it, as they must not write to the same.

    Returns:
        Where they are kept, or why not, in words.
    """
    if given := os.environ.get(CACHE_VARIABLE):
        return f"compiled programs are kept in {given}"
    runtime: Any = importlib.import_module("torch_xla.runtime")
    if runtime.device_type() == "CPU":
        return "compiled programs are not kept: XLA's CPU device writes them, and cannot read them again"
    own = folder / f"process-{runtime.global_ordinal()}"
    try:
        own.mkdir(parents=True, exist_ok=True)
        runtime.initialize_cache(str(own), readonly=False)
    except OSError as error:
        return f"compiled programs are not kept: {own} cannot be written to: {error.strerror}"
    except AssertionError:
        return (
            "compiled programs are not kept: this process had compiled some before the run. Set"
            f" {CACHE_VARIABLE}={own} before it starts"
        )
    return f"compiled programs are kept in {own}"


def _metrics() -> Any:
    return importlib.import_module("torch_xla.debug.metrics")
