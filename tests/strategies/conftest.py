"""What the tests of strategies read: the scenarios of ``setups.py``, run once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts import run_script

Said = Callable[[str], list[Any]]


@pytest.fixture(scope="session")
def said(tmp_path_factory: pytest.TempPathFactory) -> Said:
    """What the two ranks of a scenario returned, by the scenario's name."""
    folder = tmp_path_factory.mktemp("setups")
    run_script(Path(__file__).with_name("setups.py"), folder)

    def of(scenario: str) -> list[Any]:
        return [torch.load(folder / f"{scenario}.{rank}.pt", weights_only=True) for rank in (0, 1)]

    return of
