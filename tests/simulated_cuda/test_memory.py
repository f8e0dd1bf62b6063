"""The books of the allocator, and a card that is too small."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytestmark = pytest.mark.simulated_gpu


def test_what_is_allocated_is_counted_by_storage_in_blocks() -> None:
    before = torch.cuda.memory_allocated()
    x = torch.empty(1000, device="cuda")
    view = x[10:]
    assert torch.cuda.memory_allocated() - before == 4096
    del x
    assert torch.cuda.memory_allocated() - before == 4096, "a view holds it"
    del view
    assert torch.cuda.memory_allocated() == before


def test_the_peak_outlives_its_cause() -> None:
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.max_memory_allocated()
    torch.empty(2**20, device="cuda")
    assert torch.cuda.max_memory_allocated() - before == 2**22
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == before


@pytest.mark.usefixtures("two_devices")
def test_every_device_has_its_book() -> None:
    before = torch.cuda.memory_allocated(0), torch.cuda.memory_allocated(1)
    x = torch.empty(2**10, device="cuda:1")
    assert (torch.cuda.memory_allocated(0), torch.cuda.memory_allocated(1)) == (before[0], before[1] + 2**12)
    del x


def test_freed_memory_stays_reserved_until_the_cache_is_emptied() -> None:
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    torch.empty(2**22, device="cuda")
    assert torch.cuda.memory_reserved() > before
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == before


def test_a_card_that_is_too_small_says_so(card_of_mib: Callable[[float], None]) -> None:
    card_of_mib(8)
    num_oom = torch.cuda.memory_stats()["num_ooms"]
    fits = torch.empty(2**20, device="cuda")
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 8\.00 MiB"):
        torch.empty(2**21, device="cuda")
    assert torch.cuda.memory_stats()["num_ooms"] == num_oom + 1
    del fits
    torch.empty(2**21, device="cuda")


def test_a_fraction_of_the_card_is_a_smaller_card(card_of_mib: Callable[[float], None]) -> None:
    card_of_mib(8)
    torch.cuda.set_per_process_memory_fraction(0.0)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(1, device="cuda")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
