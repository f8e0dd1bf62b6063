"""Interface to torch_xla: whether it is installed, how much it has compiled, its program cache, the end of a step.

Each function imports torch_xla when it is called, since the import starts torch_xla's runtime. All names are public.
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
    """Returns why torch_xla cannot be used here and what to do; empty if it can."""
    if importlib.util.find_spec("torch_xla") is None:
        return (
            "torch_xla is not installed: pip install torch_xla==X, where X is your torch's release (on PyPI there is"
            " 2.9, for torch 2.9)"
        )
    try:
        importlib.import_module("torch_xla")
    except Exception as error:  # any error, if it was built for another torch
        return (
            f"torch_xla cannot be imported ({type(error).__name__}: {error}). It is built for one release of torch, and"
            f" this is torch {torch.__version__}: install the two of the same number"
        )
    return ""


def end_step() -> None:
    """Makes XLA compile and run the operations recorded so far, without waiting."""
    importlib.import_module("torch_xla").sync()


def programs_compiled() -> int:
    """Returns how many programs this process has compiled, without those loaded from a cache."""
    return int(_metrics().counter_value("UncachedCompile") or 0)


def compiling_s() -> float:
    """Returns the seconds that compilation has taken in this process."""
    found = _metrics().metric_data("CompileTime")
    return 0.0 if found is None else float(found[1]) / 1e9


def keep_programs(folder: Path) -> str:
    """Caches compiled programs in a folder for later runs, unless the user has set the variable.

    Has no effect after this process has compiled a program. Each process has its own subfolder, since processes must
    not share one.

    Returns:
        Where the programs are kept, or why they are not, in words.
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
