"""Which errors mean that there was no memory left, whoever says so, and how much was asked for."""

from __future__ import annotations

import gc
import re

import torch

from lightning_accel.core.heap import release_free_memory

# Of the host's allocator, and of libraries that ask a device for memory of their own.
_SAYS_SO = re.compile(r"can't allocate memory|\w+_STATUS_ALLOC_FAILED|CUDA error: out of memory|std::bad_alloc")
_ASKED = re.compile(r"(?:Tried|tried) to allocate ([\d.]+) ?(bytes|KiB|MiB|GiB)")
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` was raised for want of memory, on a device or on the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and _SAYS_SO.search(str(error)) is not None


def asked_bytes(error: BaseException) -> int | None:
    """How many bytes were asked for, as the allocators of torch say; None where nothing is said."""
    found = _ASKED.search(str(error))
    return None if found is None else int(float(found[1]) * _UNITS[found[2]])


def without_frames(error: Exception) -> Exception:
    """The exception without what the frames that it came through hold: the failed step's activations."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


def free_what_failed(device: torch.device) -> None:
    """Frees what a failed step has left: cycles of objects, and what the allocators keep for later."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    release_free_memory()
