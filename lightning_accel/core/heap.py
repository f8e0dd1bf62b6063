"""Gives memory that is free, and that the allocator of the host keeps, back to the system."""

from __future__ import annotations

import contextlib
import ctypes


def release_free_memory() -> None:
    """Gives free pieces of the heap back, where the C library is glibc; elsewhere nothing.

    A trial frees what it made, but glibc keeps the pieces for later: a run would hold memory that no step of it needs.
    See malloc_trim(3).
    """
    with contextlib.suppress(AttributeError, OSError, TypeError):  # musl, macOS; Windows takes no None
        ctypes.CDLL(None).malloc_trim(0)
