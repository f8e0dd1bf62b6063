"""Every technique alone, in every way to train, gives a plain run's numbers in one process, to 1e-5 in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from support.scripts import SUPPORT, run_script
from support.strategies.ranks import Row
from support.strategies.technique_ranks import TECHNIQUES, is_slow, tolerance, ways

pytestmark = pytest.mark.numbers

WAYS = tuple(ways(next(iter(TECHNIQUES))))


EACH = [
    pytest.param(technique, way, marks=[pytest.mark.slow] if is_slow(technique, way) else [])
    for technique in TECHNIQUES
    for way in WAYS
]


def launched(which: str, folder: Path) -> Path:
    run_script(SUPPORT / "strategies" / "technique_ranks.py", folder, which, timeout_s=900)
    return folder


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the runs of ``technique_ranks.py`` left what each rank got."""
    return launched("quick", tmp_path_factory.mktemp("techniques"))


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return launched("slow", tmp_path_factory.mktemp("techniques"))


@pytest.fixture
def folder(technique: str, way: str, request: pytest.FixtureRequest) -> Path:
    folder: Path = request.getfixturevalue("slow" if is_slow(technique, way) else "quick")
    return folder


def left_by(row: Row, rank: int, folder: Path) -> dict[str, Any]:
    """What one rank of ``row`` got; fails with what it printed where it got an error, or hung."""
    left = folder / f"{row}.{rank}.pt"
    said: dict[str, Any] = torch.load(left, weights_only=False) if left.exists() else {"error": "left nothing"}
    if "error" in said:
        pytest.fail(f"rank {rank} of {row}: {said['error']}\n{left.with_suffix('.log').read_text()[-5000:]}")
    return said


def losses(row: Row, folder: Path) -> torch.Tensor:
    """The loss of every step, the mean over the ranks."""
    return torch.tensor([left_by(row, rank, folder)["losses"] for rank in range(row.world_size)]).mean(0)


@pytest.mark.medium
@pytest.mark.parametrize(("technique", "way"), EACH)
def test_losses_and_weights_are_those_of_a_plain_run(technique: str, way: str, folder: Path) -> None:
    runs, expected = ways(technique)[way]
    largest = tolerance(technique)
    found = torch.cat([losses(row, folder) for row in runs])
    torch.testing.assert_close(found, losses(expected, folder), rtol=largest, atol=largest)
    for rank in range(runs[-1].world_size):
        weights = left_by(runs[-1], rank, folder)["weights"]
        torch.testing.assert_close(weights, left_by(expected, 0, folder)["weights"], rtol=largest, atol=largest)
