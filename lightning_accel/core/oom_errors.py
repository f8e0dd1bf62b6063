"""Recognises out-of-memory errors from any source, and reads how much memory was requested."""

from __future__ import annotations

import gc
import re

import torch

from lightning_accel.core.heap import release_free_memory

# Messages of the host's allocator, and of libraries that allocate device memory themselves.
_SAYS_SO = re.compile(r"can't allocate memory|\w+_STATUS_ALLOC_FAILED|CUDA error: out of memory|std::bad_alloc")
_ASKED = re.compile(r"(?:Tried|tried) to allocate ([\d.]+) ?(bytes|KiB|MiB|GiB)")
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether ``error`` was raised because a device or the host ran out of memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and _SAYS_SO.search(str(error)) is not None


def asked_bytes(error: BaseException) -> int | None:
    """Returns how many bytes torch's allocator could not provide; None if the message does not say."""
    found = _ASKED.search(str(error))
    return None if found is None else int(float(found[1]) * _UNITS[found[2]])


def without_frames(error: Exception) -> Exception:
    """Returns the exception without its traceback, whose frames hold the failed step's activations."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


def free_what_failed(device: torch.device) -> None:
    """Frees the memory of a failed step: reference cycles and the caches of allocators."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    release_free_memory()
