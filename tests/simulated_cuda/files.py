"""``torch.save`` from the device and ``torch.load`` to it."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from simulated_cuda import memory
from simulated_cuda.wrappers import wrapped

_of_device: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""Storages that are being loaded to the device, by number."""
_indices: dict[int, int] = {}


def _untyped(storage: Any) -> Any:
    return getattr(storage, "_untyped_storage", storage)


def _location(storage: Any) -> str | None:
    block = memory.BLOCKS.get(_untyped(storage).data_ptr())
    return None if block is None else f"cuda:{block.device}"


def _restored(storage: Any, location: str) -> Any:
    if not str(location).startswith("cuda"):
        return None
    untyped = _untyped(storage)
    _of_device[untyped._cdata] = untyped
    _indices[untyped._cdata] = torch.device(location).index or 0
    return storage


_REBUILD: Any = torch._utils._rebuild_tensor


def _rebuilt(storage: Any, *layout: Any) -> Any:
    tensor: Any = _REBUILD(storage, *layout)
    untyped = _untyped(storage)
    if _of_device.get(untyped._cdata) is not untyped:
        return tensor
    return wrapped(tensor, _indices[untyped._cdata])


def install() -> None:
    """Has torch keep the device of what it saves."""
    torch.serialization.register_package(5, _location, _restored)
    torch._utils._rebuild_tensor = _rebuilt
