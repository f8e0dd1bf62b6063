"""Converts NumPy and CuPy arrays to tensors on the same memory and back, so that functions are written once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

_NUMPYS = (np.ndarray, np.generic)
ArrayT = TypeVar("ArrayT")
"""An array of NumPy, CuPy or torch. Results are of the inputs' library."""


def as_tensors(asker: str, **arrays: ArrayT) -> tuple[tuple[Tensor, ...], Callable[[Tensor], ArrayT]]:
    """Returns the arrays as tensors, and a function that converts a tensor back to their library.

    Neither copies, except for layouts that torch lacks: negative strides, foreign byte order. Errors name the function
    ``asker`` and its arguments.

    Raises:
        TypeError: The arrays are of several libraries, of none of the three, or of a dtype that torch lacks.
        ValueError: The arrays are on several devices.
    """
    library = common_library(asker, arrays)
    read = _READ[library]
    tensors = tuple([read(asker, name, array) for name, array in arrays.items()])
    if any(tensor.device != tensors[0].device for tensor in tensors):
        found = ", ".join(f"{name} on {tensor.device}" for name, tensor in zip(arrays, tensors, strict=True))
        raise ValueError(f"{asker}: {found}. Move them to one device.")
    return tensors, _GIVE_BACK[library]


def common_library(asker: str, arrays: Mapping[str, object]) -> str:
    """Returns the library of all arrays (name → array). Raises a TypeError unless it is one of the three."""
    first: dict[str, str] = {}  # library → first argument of it
    for name, array in arrays.items():
        library = library_of(array)
        if library is None:
            raise TypeError(
                f"{asker}({name}=...) is of type {type(array).__name__}. Allowed: arrays of NumPy (without a mask),"
                " CuPy or torch."
            )
        first.setdefault(library, name)
    if len(first) != 1:
        found = ", ".join(f"{name} of {library}" for library, name in first.items())
        raise TypeError(
            f"{asker}: {found}. Give arrays of one library: torch.from_numpy() and torch.from_dlpack() share memory."
        )
    return next(iter(first))


def library_of(array: object) -> str | None:
    """Returns ``"torch"``, ``"NumPy"`` or ``"CuPy"``; None for other objects and for NumPy's masked arrays."""
    if isinstance(array, Tensor):
        return "torch"
    if isinstance(array, _NUMPYS):
        # A tensor cannot hold a mask.
        return None if isinstance(array, np.ma.MaskedArray) else "NumPy"
    # Not imported here: whoever has such an array has imported CuPy.
    return "CuPy" if type(array).__module__.partition(".")[0] == "cupy" and hasattr(array, "__dlpack__") else None


def numpy_as_tensor(array: np.ndarray[Any, Any]) -> Tensor:
    """Returns a read-only tensor on a NumPy array's memory; a copy if torch does not support the layout.

    Raises a TypeError if torch lacks the dtype.
    """
    try:
        return torch.from_numpy(array if array.flags.writeable else _unlocked(array))
    except ValueError:  # the layout
        return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), order="C"))


def tensor_as_numpy(tensor: Tensor) -> np.ndarray[Any, Any]:
    """Returns a host tensor's memory as an array, for immediate use. The tensor can still be resized afterwards.

    ``tensor.numpy()`` would fix the size of its storage, which belongs to the user, permanently.
    """
    dtype = np.dtype(str(tensor.dtype).removeprefix("torch."))
    if not tensor.numel():  # may have no memory, and NumPy 1 rejects address 0
        return np.empty(tuple(tensor.shape), dtype)
    strides = tuple(step * tensor.itemsize for step in tensor.stride())
    place = {"version": 3, "shape": tuple(tensor.shape), "typestr": dtype.str, "strides": strides}
    return np.asarray(_Memory(tensor, place | {"data": (tensor.data_ptr(), False)}))


def _unlocked(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Returns a read-only array's memory as a writable array, since torch warns about read-only ones, once per process.

    Nothing here writes. Suppressing the warning would hide it from the user's own code, which may write.
    """
    interface = array.__array_interface__
    return np.asarray(_Memory(array, {**interface, "data": (interface["data"][0], False)}))


class _Memory:
    def __init__(self, owner: Any, interface: dict[str, Any]) -> None:
        self.owner = owner  # kept alive by the array on its memory
        self.__array_interface__ = interface


def plain(tensor: Tensor) -> Tensor:
    """Returns the tensor without features that array libraries lack: gradients and lazy conjugation or negation."""
    return tensor.detach().resolve_conj().resolve_neg()


def _read_numpy(asker: str, name: str, array: Any) -> Tensor:
    try:
        return numpy_as_tensor(np.asarray(array))
    except TypeError:
        raise TypeError(
            f"{asker}({name}=...) holds {array.dtype}, which torch does not have. Allowed: floating point of 16 to 64"
            " bits, complex numbers of 64 and 128 bits, integers, booleans."
        ) from None


def _read_cupy(asker: str, name: str, array: Any) -> Tensor:
    if any(stride < 0 or stride % array.itemsize for stride in array.strides):
        array = array.copy()  # torch would crash the process (pytorch/pytorch#188023)
    try:
        # Lets torch's current stream wait for CuPy's.
        return from_dlpack(array)
    except (RuntimeError, BufferError, TypeError) as error:
        raise TypeError(
            f"{asker}({name}=...) is a CuPy array of {array.dtype} that torch {torch.__version__} cannot share"
            f" ({error}). It takes a torch built for the same GPU, and a dtype that torch has."
        ) from error


def _to_cupy(tensor: Tensor) -> Any:
    import cupy

    with torch.cuda.device(tensor.device):  # torch exports only from its current device
        return cupy.from_dlpack(plain(tensor))


_READ: dict[str, Callable[[str, str, Any], Tensor]] = {
    "torch": lambda asker, name, array: array,
    "NumPy": _read_numpy,
    "CuPy": _read_cupy,
}
_GIVE_BACK: dict[str, Callable[[Tensor], Any]] = {
    "torch": lambda tensor: tensor,
    # "force" also detaches gradients and resolves lazy conjugations. Tensors on the host are not copied.
    "NumPy": lambda tensor: tensor.numpy(force=True),
    "CuPy": _to_cupy,
}
