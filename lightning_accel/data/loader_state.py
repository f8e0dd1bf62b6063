"""What a loader's batches may hang on beside the indices: random numbers, and data that change as they are read."""

from __future__ import annotations

import io
import zlib
from typing import Any

import cloudpickle
import numpy as np
import torch
from torch import Tensor

from lightning_accel.core.torch_private.tensors import version_of
from lightning_accel.experiment.digest import hasher
from lightning_accel.ops.arrays import tensor_as_numpy

MOST_BYTES = 256 * 2**20
"""Of Python objects; arrays and tensors do not count."""

_SAMPLED = 4096  # elements of an array that are looked at


class UnreadableError(Exception):
    """Of data that have something in them which cannot be handed to another process, or looked through."""


def state_of(*parts: Any) -> bytes:
    """A digest of everything that ``parts`` refer to: the same as long as nothing of it has changed.

    Objects are followed as pickle follows them, closures and lambdas included. Of arrays and tensors only where they
    are, how often they were changed and a sample of their elements is looked at: nothing is copied. Not seen are
    globals of modules and what a library keeps outside of Python.

    Raises:
        UnreadableError: Something cannot be pickled (an open file, a connection, a lock: what two processes must not
            share), is on a GPU, or it is too much.
    """
    digest = _Digest()
    try:
        _StateReader(digest, protocol=5).dump(parts)
    except UnreadableError:
        raise
    except Exception as error:
        raise UnreadableError(f"{type(error).__name__}: {error}") from error
    return digest.hash.digest()


class _Digest:
    def __init__(self) -> None:
        self.hash, self._bytes = hasher(), 0

    def write(self, data: Any) -> None:
        self._bytes += memoryview(data).nbytes
        if self._bytes > MOST_BYTES:
            raise UnreadableError(
                f"it has more than {MOST_BYTES >> 20} MiB of Python objects, too much to look through"
            )
        self.hash.update(data)


class _StateReader(cloudpickle.Pickler):  # type: ignore[misc]
    def persistent_id(self, thing: Any) -> Any:
        """In place of what is not to be copied."""
        if isinstance(thing, Tensor):
            return _of_tensor(thing)
        if isinstance(thing, io.IOBase) and not isinstance(thing, io.BytesIO | io.StringIO):
            raise UnreadableError(f"they have an open file ({thing!r}), of which two processes would read at one place")
        if isinstance(thing, torch.Generator):
            return "generator", zlib.crc32(thing.get_state().numpy().tobytes())
        if isinstance(thing, np.ndarray) and not thing.dtype.hasobject:
            return _of_array(thing)
        return None


def _of_tensor(tensor: Tensor) -> tuple[Any, ...]:
    if tensor.device.type != "cpu":
        raise UnreadableError(f"they have a tensor on {tensor.device}, which processes that load cannot use")
    kind = "tensor", tuple(tensor.shape), str(tensor.dtype), None if tensor.is_inference() else version_of(tensor)
    if tensor.layout is not torch.strided:
        return kind
    sample = tensor.detach()[_strides(tensor.shape)].contiguous().reshape(-1).view(torch.uint8)
    return *kind, tensor.data_ptr(), zlib.crc32(tensor_as_numpy(sample).tobytes())


def _of_array(array: np.ndarray[Any, Any]) -> tuple[Any, ...]:
    kind = "array", array.shape, str(array.dtype), array.__array_interface__["data"][0]
    if isinstance(array, np.memmap) or not array.size:  # a file would be read at as many places
        return kind
    return *kind, zlib.crc32(array[_strides(array.shape)].tobytes())


def _strides(shape: Any) -> tuple[slice, ...]:
    """So many elements of each dimension that there are about as many as a sample has."""
    left, strides = _SAMPLED, []
    for size in shape:
        step = max(1, -(-size // left))
        left = max(1, left // -(-size // step)) if size else left
        strides.append(slice(None, None, step))
    return tuple(strides)
