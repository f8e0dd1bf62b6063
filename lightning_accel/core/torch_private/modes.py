"""Private names of the modes that see every operation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import _C
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation under it: ``torch.utils._python_dispatch.TorchDispatchMode``, since torch 1.13.

    There is no public base for that. Without it the library cannot be imported.
    """


def has_modes() -> bool:
    """Whether dispatch or function modes see every operation: ``_len_torch_dispatch_stack``, since torch 2.0.

    TorchDynamo captures nothing, or anew, under them. Without the name every captured attention runs as it was
    written, for the reason that the AttributeError gives.
    """
    return bool(_C._len_torch_dispatch_stack()) or torch.overrides.has_torch_function(_NOTHING)


_NOTHING = (None,)  # what only modes can have a torch function for


def without_dispatch_modes() -> AbstractContextManager[Any]:
    """Has nobody who watches operations see those inside: ``_disable_current_modes``, since torch 2.0.

    Somebody may be counting FLOPs while a trial runs. Without it every trial fails, and says so.
    """
    return _disable_current_modes()


@contextmanager
def without_function_modes() -> Iterator[list[Any]]:
    """Takes the function modes away, yields them, outermost first, and puts them back.

    ``_pop_mode`` of ``torch.overrides``, since torch 2.0; a mode's own exit may do more than that, and its own entry
    more than that of the base class. As for :func:`has_modes`.
    """
    overrides: Any = torch.overrides
    modes: list[Any] = []
    while overrides.has_torch_function(_NOTHING):
        modes.insert(0, overrides._pop_mode())
    try:
        yield modes
    finally:
        for mode in modes:
            overrides.TorchFunctionMode.__enter__(mode)
