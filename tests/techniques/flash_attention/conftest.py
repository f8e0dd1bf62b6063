"""After every test of attention, what Dynamo has captured of its modules is forgotten."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _forget_captures() -> Iterator[None]:
    yield
    torch._dynamo.reset()
