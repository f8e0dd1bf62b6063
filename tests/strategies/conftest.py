"""What the tests of strategies read: the scenarios of ``setups.py``, run once."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

Said = Callable[[str], list[Any]]


@pytest.fixture(scope="session")
def said(tmp_path_factory: pytest.TempPathFactory) -> Said:
    """What the two ranks of a scenario returned, by the scenario's name."""
    folder = tmp_path_factory.mktemp("setups")
    script = Path(__file__).with_name("setups.py")
    run = subprocess.run([sys.executable, script, folder], capture_output=True, text=True, timeout=300, cwd=folder)
    assert run.returncode == 0, run.stdout + run.stderr

    def of(scenario: str) -> list[Any]:
        return [torch.load(folder / f"{scenario}.{rank}.pt", weights_only=True) for rank in (0, 1)]

    return of
