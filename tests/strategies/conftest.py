"""What the tests of strategies read: the scenarios of ``setups.py``, each run once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from support.scripts import run_script
from support.strategies import setups
from support.strategies.scenarios import SCENARIOS, SLOW

Said = Callable[[str], list[Any]]


@pytest.fixture(scope="session")
def said(tmp_path_factory: pytest.TempPathFactory) -> Said:
    """What the two ranks of a scenario returned, by the scenario's name.

    Those of one subject (of ``ddp_scenarios.py``, say) run together, when the first is asked for: another file of tests
    is another worker's, with another subject.
    """
    folder = tmp_path_factory.mktemp("setups")

    @functools.cache
    def run(subject: str) -> None:
        run_script(Path(setups.__file__), folder, *(name for name in SCENARIOS if subject_of(name) == subject))

    def of(scenario: str) -> list[Any]:
        run(subject_of(scenario))
        return [torch.load(folder / f"{scenario}.{rank}.pt", weights_only=True) for rank in (0, 1)]

    return of


def subject_of(scenario: str) -> str:
    """The slow ones are a subject of their own."""
    subject = SCENARIOS[scenario].__module__.rpartition(".")[2].partition("_")[0]
    return f"{subject}, slow" if scenario in SLOW else subject
