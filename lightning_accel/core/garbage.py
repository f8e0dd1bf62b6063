"""Keeps Python's garbage collector out of what makes many objects at once."""

from __future__ import annotations

import gc
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager

from lightning_accel.core.torch_private.compilation import lean_captures

_OF_PYTHON = 1000  # objects: Python 3.12 freezes 375 when it starts


@contextmanager
def young_garbage_only() -> Iterator[None]:
    """Inside, nothing is collected; at the end, only garbage that was made inside.

    CPython looks through all objects once a quarter of them is new. The first capture of TorchDynamo imports hundreds
    of modules, which are no garbage, and the collection after them takes 0.2 s. Here they become old objects without
    one. Does nothing where the program has settled this itself, by ``gc.disable`` or ``gc.freeze``, and without the
    global interpreter lock, where every collection is one of all objects.
    """
    has_lock = not sysconfig.get_config_var("Py_GIL_DISABLED")
    if not (has_lock and gc.isenabled() and gc.get_freeze_count() <= _OF_PYTHON):
        yield
        return
    gc.collect(1)  # what is garbage already must not become old
    try:
        gc.disable()
        with lean_captures():
            yield
    finally:
        try:
            gc.collect(0)
            gc.freeze()  # makes all objects permanent, and the next line makes them old
        finally:
            gc.unfreeze()
            gc.enable()
