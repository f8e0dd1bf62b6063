"""All of it at once."""

from __future__ import annotations

import functools
import os
from pathlib import Path

CHILDREN = Path(__file__).with_name("children")


@functools.cache
def install() -> None:
    """Makes torch, which must not be imported yet, one that has a CUDA device.

    Raises:
        simulated_cuda.native.UnavailableError: There can be none here; the message says why.
    """
    # Here: the first loads what is in C++, which has to be there when torch is imported.
    from simulated_cuda import streams  # noqa: F401, I001
    from simulated_cuda import dispatch, events, factories, files, names, seeds, tensors

    for module in (events, dispatch, factories, tensors, names, seeds, files):
        module.install()


def share() -> None:
    """Gives the device to every Python process that this one starts."""
    theirs = [str(CHILDREN), str(CHILDREN.parents[1]), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, theirs))
