"""Tensors as arrays of NumPy or CuPy and back, nothing copied; CuPy as a guest in torch's memory and on its stream."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from lightning_accel.core.device import with_index
from lightning_accel.ops.arrays import numpy_as_tensor, plain

Array = Any  # of NumPy or CuPy


class NumpyArrays:
    """NumPy at work on tensors in the host's memory; ``xp`` is the library."""

    xp: Any = np

    @contextmanager
    def running(self) -> Iterator[None]:
        """Entered around everything that computes with the arrays."""
        yield

    def array(self, tensor: Tensor) -> Array:
        """The tensor's memory as an array; of float32 where the library lacks the dtype (bfloat16)."""
        tensor = plain(tensor).cpu()  # where it is already, unless a loader gives tensors of a device without CuPy
        return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()

    def tensor(self, array: Array) -> Tensor:
        """The array as a tensor: the same memory where torch can have it so, else a copy."""
        array = np.asarray(array)
        return numpy_as_tensor(array if array.flags.writeable else array.copy())  # whose tensor will be written to

    def upload(self, values: np.ndarray[Any, Any]) -> Array:
        """Small values that were drawn on the host, as an array beside the batch."""
        return values

    def empty(self, shape: tuple[int, int, int, int], dtype: torch.dtype, memory_format: torch.memory_format) -> Tensor:
        """New memory for images ``(N, C, H, W)``."""
        # NumPy asks for large pages, torch does not, and writing to new small ones takes as long as the arithmetic.
        memory = torch.from_numpy(np.empty(math.prod(shape), f"i{dtype.itemsize}")).view(dtype)
        if memory_format == torch.contiguous_format:
            return memory.view(shape)
        samples, channels, height, width = shape
        return memory.view(samples, height, width, channels).permute(0, 3, 1, 2)


class CupyArrays:
    """CuPy at work on tensors of one CUDA device, with the methods of :class:`NumpyArrays`.

    What is handed out as a tensor is always memory that torch allocated as a tensor. Torch knows only of those which
    streams use them: :meth:`torch.Tensor.record_stream` silently passes over memory that came in through DLPack.
    """

    def __init__(self, device: torch.device) -> None:
        self.xp = _cupy()
        self._device = with_index(device)
        self._origins: list[Tensor] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        cupy = self.xp
        # Asked for at each use: the current stream is another one inside the pipeline, and in a user's own context.
        stream = torch.cuda.current_stream(self._device)
        allocator = cupy.cuda.PythonFunctionAllocator(_allocate, _free)
        try:
            with (
                torch.cuda.device(self._device),
                cupy.cuda.Device(self._device.index),
                cupy.cuda.using_allocator(allocator.malloc),
                cupy_stream(stream),
            ):
                yield
        finally:
            self._origins.clear()

    def array(self, tensor: Tensor) -> Array:
        tensor = plain(tensor).to(self._device)  # where it is already, unless the user's own transfer left it behind
        tensor = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
        self._origins.append(tensor)
        return self.xp.from_dlpack(tensor)

    def tensor(self, array: Array) -> Tensor:
        dtype = from_dlpack(self.xp.empty(0, array.dtype)).dtype
        view = self._as_view_of_origin(array, dtype)
        if view is not None:
            return view
        tensor = torch.empty(array.shape, dtype=dtype, device=self._device)
        self.xp.from_dlpack(tensor)[...] = array
        return tensor

    def upload(self, values: np.ndarray[Any, Any]) -> Array:
        # A copy from pageable memory would wait for the device. As bytes, since not every CuPy takes bool from others.
        pinned = torch.from_numpy(np.ascontiguousarray(values).reshape(-1).view(np.uint8)).pin_memory()
        return self.array(pinned.to(self._device, non_blocking=True)).view(values.dtype).reshape(values.shape)

    def empty(self, shape: tuple[int, int, int, int], dtype: torch.dtype, memory_format: torch.memory_format) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device, memory_format=memory_format)

    def _as_view_of_origin(self, array: Array, dtype: torch.dtype) -> Tensor | None:
        """The array as a view of the tensor whose memory it lies in."""
        if not array.size or any(stride < 0 or stride % array.itemsize for stride in array.strides):
            return None
        for origin in self._origins:
            storage = origin.untyped_storage()
            offset = array.data.ptr - storage.data_ptr()
            if 0 <= offset < storage.nbytes() and offset % array.itemsize == 0:
                strides = [stride // array.itemsize for stride in array.strides]
                empty = torch.empty(0, dtype=dtype, device=self._device)
                return empty.set_(storage, offset // array.itemsize, array.shape, strides)
        return None


Arrays = NumpyArrays | CupyArrays


def cupy_stream(stream: torch.cuda.Stream) -> Any:
    """A stream of torch's as one of CuPy's; asked for where its device is the current one."""
    cuda = _cupy().cuda
    if hasattr(cuda.Stream, "from_external"):  # from CuPy 14 on, which warns of the other way
        return cuda.Stream.from_external(stream)
    return cuda.ExternalStream(stream.cuda_stream, stream.device_index)


def writable(arrays: Arrays, tensor: Tensor) -> Array:
    """A new tensor's memory, to be written by a kernel; bfloat16 as uint16 bits."""
    if tensor.dtype == torch.bfloat16:
        return arrays.array(tensor.view(torch.int16)).view(arrays.xp.uint16)
    return arrays.array(tensor)


def why_no_cupy(device: torch.device) -> str | None:
    """Why CuPy cannot compute on ``device``, with the mend; None when it can. Tried once, on a few numbers."""
    if device.type != "cuda":
        return f"CuPy computes on CUDA devices, and this is {device.type}"
    if torch.version.cuda is None and torch.version.hip is None:
        return "this torch was built without CUDA"
    return _why_no_cupy(with_index(device).index)


@functools.cache
def _why_no_cupy(index: int) -> str | None:
    wanted = (torch.version.cuda or "").partition(".")[0]
    package = f"cupy-cuda{wanted}x" if wanted else "cupy"
    mend = f"pip install 'lightning-accel[cuda{wanted}]'" if wanted else "install CuPy for ROCm"
    try:
        cupy = _cupy()
    except ImportError as error:
        trouble = "is not installed" if error.name == "cupy" else f"cannot be imported ({_first_line(error)})"
        return f"CuPy {trouble}: {mend}"
    try:
        arrays = CupyArrays(torch.device("cuda", index))
        with arrays.running():
            numbers = torch.arange(4, device=f"cuda:{index}")
            # Compiled by CuPy, which needs the libraries of the CUDA that it was built for.
            works = arrays.tensor(arrays.array(numbers) * 2 + 1).tolist() == [1, 3, 5, 7]
    except Exception as error:
        built = ""
        with suppress(Exception):
            built = str(cupy.cuda.runtime.runtimeGetVersion() // 1000)
        if wanted and built and built != wanted:
            return (
                f"this CuPy was built for CUDA {built} and torch for CUDA {wanted} ({_first_line(error)}):"
                f" pip uninstall cupy-cuda{built}x, then {mend}"
            )
        return f"CuPy does not work on this device ({type(error).__name__}: {_first_line(error)}): reinstall {package}"
    return None if works else f"CuPy computes wrong numbers on this device: reinstall {package}"


def _cupy() -> Any:
    import cupy

    return cupy


def _first_line(error: BaseException) -> str:
    """What an error says; CuPy frames what it says of its libraries in rules, with the reason at the end."""
    _, _, reason = str(error).rpartition("Original error:")
    lines = (line.strip() for line in reason.splitlines())
    return next((line for line in lines if line.strip("=-* ")), type(error).__name__)


def _allocate(size: int, device: int) -> int:
    return int(torch.cuda.caching_allocator_alloc(size, device)) if size else 0


def _free(pointer: int, device: int) -> None:
    if pointer:
        torch.cuda.caching_allocator_delete(pointer)  # type: ignore[no-untyped-call]
