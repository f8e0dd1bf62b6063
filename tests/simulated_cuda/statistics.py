"""The names of ``torch.cuda.memory``."""

from __future__ import annotations

from typing import Any

import torch

from simulated_cuda import memory
from simulated_cuda.card import CARD
from simulated_cuda.events import device_index

_HELD: dict[int, torch.Tensor] = {}  # by address: what caching_allocator_alloc has given out


def book(device: Any = None) -> memory.Book:
    return memory.BOOKS[device_index(device)]


def _memory_stats(device: Any = None) -> dict[str, int]:
    own = book(device)
    num_blocks = sum(block.device == device_index(device) for block in memory.BLOCKS.values())
    return {
        "allocated_bytes.all.current": own.used,
        "allocated_bytes.all.peak": own.peak,
        "active_bytes.all.current": own.used,
        "active_bytes.all.peak": own.peak,
        "reserved_bytes.all.current": own.reserved,
        "reserved_bytes.all.peak": own.reserved_peak,
        "inactive_split_bytes.all.current": 0,
        "inactive_split_bytes.all.peak": 0,
        "allocation.all.allocated": own.num_allocations,
        "allocation.all.current": num_blocks,
        "segment.all.current": 1,
        "segment.all.allocated": 1,
        "segment.all.freed": 0,
        "num_alloc_retries": 0,
        "num_ooms": own.num_oom,
        "num_device_alloc": 1,
        "num_device_free": 0,
    }


def empty_cache() -> None:
    # While the allocator believes in a capture it asks no events, and gives back what it has free.
    for book in memory.BOOKS:
        book.give_back()


def _caching_allocator_alloc(size: int, device: Any = None, stream: Any = None) -> int:
    values = torch.empty(size, dtype=torch.uint8)
    memory.allocate(values, device_index(device))
    _HELD[values.data_ptr()] = values
    return values.data_ptr()


def _set_fraction(fraction: float, device: Any = None) -> None:
    book(device).fraction = fraction


NAMES = {
    "memory_allocated": lambda device=None: book(device).used,
    "max_memory_allocated": lambda device=None: book(device).peak,
    "memory_reserved": lambda device=None: book(device).reserved,
    "max_memory_reserved": lambda device=None: book(device).reserved_peak,
    "mem_get_info": lambda device=None: (max(0, CARD.total_bytes - book(device).reserved), CARD.total_bytes),
    "memory_stats": _memory_stats,
    "memory_stats_as_nested_dict": lambda device=None: {},
    "reset_peak_memory_stats": lambda device=None: book(device).reset_peaks(),
    "reset_accumulated_memory_stats": lambda device=None: None,
    "empty_cache": empty_cache,
    "caching_allocator_alloc": _caching_allocator_alloc,
    "caching_allocator_delete": lambda address: _HELD.pop(address, None) and None,
    "get_per_process_memory_fraction": lambda device=None: book(device).fraction,
    "set_per_process_memory_fraction": _set_fraction,
    "get_allocator_backend": lambda: "native",
    "memory_summary": lambda *_, **options: "simulated",
    "memory_snapshot": lambda *_, **options: [],
}
