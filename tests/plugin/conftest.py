"""Small runs beside others: a second thread would only wait for the first."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from lightning_accel.lightning import met_programs
from support.live_runs import Speed
from support.plugin.beginners import There


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def new_to_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """No program was met before, and ``Speed`` makes those steps faster that it is around."""
    monkeypatch.setattr(met_programs, "PROGRAMS", {})
    monkeypatch.setattr(Speed, "from_settings", classmethod(lambda cls, *_: There()))
