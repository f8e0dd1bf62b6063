"""These tests are of the simulated device: without it (``-p simulated_cuda.plugin``) there is nothing to collect."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

_plugin = sys.modules.get("simulated_cuda.plugin")
collect_ignore_glob = [] if _plugin is not None and not _plugin.UNAVAILABLE else ["test_*.py"]


@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with two of them."""
    from simulated_cuda.card import CARD

    monkeypatch.setattr(CARD, "count", 2)


@pytest.fixture
def card_of_mib(monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """To make the card smaller: so many MiB more than are in use."""
    from simulated_cuda import memory
    from simulated_cuda.card import CARD

    def shrink(mib: float) -> None:
        memory.BOOKS[0].give_back()
        monkeypatch.setattr(CARD, "total_bytes", memory.BOOKS[0].used + int(mib * 2**20))

    yield shrink
    memory.BOOKS[0].give_back()
