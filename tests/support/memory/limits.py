"""What the system grants this process, made less for a while: a full disk, a full memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

resource = pytest.importorskip("resource")


@contextmanager
def limited(kind: int, soft: int) -> Iterator[None]:
    """Inside, the system grants this process no more than ``soft``."""
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)
