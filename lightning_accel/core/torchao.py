"""The optional library torchao: checks that it works, and imports its modules without their log messages."""

from __future__ import annotations

import importlib
import importlib.util
import logging
from types import ModuleType

from lightning_accel.core.patch import temporarily

INSTALL = "install torchao: pip install 'lightning-accel[torchao]'"


def why_missing(module: str) -> str | None:
    """Returns why a torchao module cannot be imported and what to do; None if it can. Its import takes seconds."""
    if importlib.util.find_spec("torchao") is None:
        return INSTALL
    try:
        load(module)
    except Exception as error:  # built for another torch
        return f"torchao could not be imported ({type(error).__name__}: {error}): pip install -U torchao"
    return None


def load(module: str) -> ModuleType:
    """Imports a module of torchao, such as ``"torchao.float8"``.

    On import, torchao warns about its compiled kernels that this machine or torch cannot load. None of those kernels is
    used here.
    """
    with temporarily(lambda: logging.root.manager.disable, logging.disable, logging.WARNING):
        return importlib.import_module(module)
