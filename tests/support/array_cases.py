"""Arrays of several libraries and layouts, and a count of what torch is asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

LIBRARIES: dict[str, Callable[[Any], Any]] = {"NumPy": np.asarray, "torch": torch.from_numpy}


def numbers(*shape: int, dtype: Any = np.float64) -> Any:
    """Normal ones, of NumPy; the same in every run of a test."""
    return np.random.standard_normal(shape).astype(dtype)


def spread(array: Any) -> Any:
    """The same numbers, with gaps between them."""
    memory = np.zeros([2 * length for length in array.shape], array.dtype)
    view = memory[tuple(slice(None, None, 2) for _ in array.shape)]
    view[...] = array
    return view


LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "contiguous": np.ascontiguousarray,
    "Fortran's order": np.asfortranarray,
    "with gaps": spread,
    "backwards": lambda array: np.ascontiguousarray(array[..., ::-1])[..., ::-1],
}


class Calls(TorchDispatchMode):
    """The names of the operators that torch runs."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))
