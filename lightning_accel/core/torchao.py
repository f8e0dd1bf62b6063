"""torchao, which is optional: whether it is here, and its modules, imported without what they log."""

from __future__ import annotations

import importlib
import importlib.util
import logging
from types import ModuleType

from lightning_accel.core.patch import temporarily

INSTALL = "install torchao: pip install 'lightning-accel[torchao]'"


def why_missing(module: str) -> str | None:
    """Why a module of torchao cannot be had, with the mend; None where it can. Imports it, which takes seconds."""
    if importlib.util.find_spec("torchao") is None:
        return INSTALL
    try:
        load(module)
    except Exception as error:  # built for another torch
        return f"torchao could not be imported ({type(error).__name__}: {error}): pip install -U torchao"
    return None


def load(module: str) -> ModuleType:
    """A module of torchao: ``"torchao.float8"``.

    On import torchao logs, as warnings, which of its own compiled kernels this machine or this torch cannot load. None
    of them is used here.
    """
    with temporarily(lambda: logging.root.manager.disable, logging.disable, logging.WARNING):
        return importlib.import_module(module)
