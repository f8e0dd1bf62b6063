"""Keeps Python's garbage collector out of what makes many objects at once."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_OF_PYTHON = 1000  # objects: Python 3.12 freezes 375 when it starts


@contextmanager
def young_garbage_only() -> Iterator[None]:
    """Inside, nothing is collected; at the end, only what was made inside.

    CPython collects everything as soon as a quarter of all objects is new. The first capture of TorchDynamo imports
    hundreds of modules, which are no garbage, and the collection after them takes 0.2 s. Here they become old objects
    without one. Does nothing where the program has settled this itself, by ``gc.disable`` or ``gc.freeze``.
    """
    if not gc.isenabled() or gc.get_freeze_count() > _OF_PYTHON:
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.collect(0)
        gc.freeze()  # makes all objects permanent, and the next line makes them old
        gc.unfreeze()
