"""Heads as small as those of tests are left to torch; here they count as large."""

from __future__ import annotations

import pytest

from lightning_accel.techniques.loss import technique
from support.loss_models import VOCABULARY


@pytest.fixture
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has heads of the tests' sizes count as large."""
    monkeypatch.setattr(technique, "FEWEST_CLASSES", VOCABULARY)
    monkeypatch.setattr(technique, "SMALLEST_BYTES", 0)
