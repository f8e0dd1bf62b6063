"""Private names of the modes that intercept every operation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import _C
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Intercepts every operation under it: ``torch.utils._python_dispatch.TorchDispatchMode``, since torch 1.13.

    There is no public base class. Without it the library cannot be imported.
    """


def has_modes() -> bool:
    """Returns whether a dispatch mode or function mode is active: ``_len_torch_dispatch_stack``, since torch 2.0.

    Under modes, TorchDynamo captures nothing or captures again. Without the name every captured attention runs as
    written, with the AttributeError as the reason.
    """
    return bool(_C._len_torch_dispatch_stack()) or torch.overrides.has_torch_function(_NOTHING)


_NOTHING = (None,)  # only modes have a torch function for this


def without_dispatch_modes() -> AbstractContextManager[Any]:
    """Hides the operations inside the context from all dispatch modes: ``_disable_current_modes``, since torch 2.0.

    A mode may be counting FLOPs while a trial runs. Without the name every trial fails and reports it.
    """
    return _disable_current_modes()


@contextmanager
def without_function_modes() -> Iterator[list[Any]]:
    """Removes the function modes, yields them, outermost first, and restores them at the end.

    ``_pop_mode`` of ``torch.overrides``, since torch 2.0. A mode's own ``__enter__`` and ``__exit__`` may do more than
    those of the base class, so they are not called. If the name is missing: as for :func:`has_modes`.
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
