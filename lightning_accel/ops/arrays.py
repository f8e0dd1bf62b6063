"""Arrays of NumPy and CuPy as tensors over the same memory, and back: so that every function is written once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

_NUMPYS = (np.ndarray, np.generic)
ArrayT = TypeVar("ArrayT")
"""An array of NumPy, CuPy or torch: what comes out is of the library that went in."""


def as_tensors(asker: str, **arrays: ArrayT) -> tuple[tuple[Tensor, ...], Callable[[Tensor], ArrayT]]:
    """The arrays as tensors, and the function that turns a tensor into an array of their library.

    Neither copies, but for arrays in a layout that torch does not have: negative strides, foreign byte order. Errors
    say whose arguments they are, the asker's, by their names.

    Raises:
        TypeError: They are of several libraries, or of none of the three, or of a dtype that torch does not have.
        ValueError: They are on several devices.
    """
    library = common_library(asker, arrays)
    read = _READ[library]
    tensors = tuple([read(asker, name, array) for name, array in arrays.items()])
    if any(tensor.device != tensors[0].device for tensor in tensors):
        found = ", ".join(f"{name} on {tensor.device}" for name, tensor in zip(arrays, tensors, strict=True))
        raise ValueError(f"{asker}: {found}. Move them to one device.")
    return tensors, _GIVE_BACK[library]


def common_library(asker: str, arrays: Mapping[str, object]) -> str:
    """The library that all of the arrays, name → array, are of; a TypeError where it is not one of the three."""
    first: dict[str, str] = {}  # of each library
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
    """``"torch"``, ``"NumPy"`` or ``"CuPy"``; None for what is no array of theirs, and for NumPy's masked arrays."""
    if isinstance(array, Tensor):
        return "torch"
    if isinstance(array, _NUMPYS):
        # A tensor has nowhere to keep a mask.
        return None if isinstance(array, np.ma.MaskedArray) else "NumPy"
    # Asked without an import: whoever has such an array has imported CuPy.
    return "CuPy" if type(array).__module__.partition(".")[0] == "cupy" and hasattr(array, "__dlpack__") else None


def numpy_as_tensor(array: np.ndarray[Any, Any]) -> Tensor:
    """A NumPy array's memory as a tensor, not to be written to; a copy where torch has no such layout.

    A TypeError where torch does not have the dtype.
    """
    try:
        return torch.from_numpy(array if array.flags.writeable else _unlocked(array))
    except ValueError:  # the layout
        return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), order="C"))


def tensor_as_numpy(tensor: Tensor) -> np.ndarray[Any, Any]:
    """The memory of a tensor on the host as an array, to be read or written at once: the tensor may be resized later.

    After ``tensor.numpy()`` it could not be: that makes its storage, which is the user's, one of a fixed size for good.
    """
    dtype = np.dtype(str(tensor.dtype).removeprefix("torch."))
    if not tensor.numel():  # it may have no memory, and NumPy 1 takes no address of 0
        return np.empty(tuple(tensor.shape), dtype)
    strides = tuple(step * tensor.itemsize for step in tensor.stride())
    place = {"version": 3, "shape": tuple(tensor.shape), "typestr": dtype.str, "strides": strides}
    return np.asarray(_Memory(tensor, place | {"data": (tensor.data_ptr(), False)}))


def _unlocked(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The memory of a read-only array as one that is not: torch warns of any other, once a process.

    Nothing here writes; and a warning kept from being shown would be lost to the user's own code, which may.
    """
    interface = array.__array_interface__
    return np.asarray(_Memory(array, {**interface, "data": (interface["data"][0], False)}))


class _Memory:
    def __init__(self, owner: Any, interface: dict[str, Any]) -> None:
        self.owner = owner  # kept alive by what shares its memory
        self.__array_interface__ = interface


def plain(tensor: Tensor) -> Tensor:
    """Without what array libraries do not know: gradients, and conjugations that torch has put off."""
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
        array = array.copy()  # of such, torch does not raise but ends the process (pytorch/pytorch#188023)
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

    with torch.cuda.device(tensor.device):  # torch gives away what is on its current device alone
        return cupy.from_dlpack(plain(tensor))


_READ: dict[str, Callable[[str, str, Any], Tensor]] = {
    "torch": lambda asker, name, array: array,
    "NumPy": _read_numpy,
    "CuPy": _read_cupy,
}
_GIVE_BACK: dict[str, Callable[[Tensor], Any]] = {
    "torch": lambda tensor: tensor,
    # "force" also lets go of gradients and carries out conjugations put off; what lies on the host is not copied.
    "NumPy": lambda tensor: tensor.numpy(force=True),
    "CuPy": _to_cupy,
}
