"""Lightning's two packages: a program may use either, or both, and has the same of each."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support import either_package

pytestmark = pytest.mark.medium

STEPS = 3 * 8
HELD = {
    "is of its Trainer's package": True,
    "is mixed if it autocasts": True,
    "is its strategy": True,
    "are its callbacks": True,
    "the user's override is called": True,
    "applied": ["net.0"],
    "same weights": [True, True, True, True],
    "measured": 1,
    "cli": True,
}


def outcome(folder: Path, *packages: str) -> dict[str, Any]:
    """What the program printed."""
    command = [sys.executable, "-W", "ignore", either_package.__file__, str(folder), *packages]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("package", ["pytorch_lightning", "lightning.pytorch"])
def test_a_program_of_one_package_does_not_import_the_other(tmp_path: Path, package: str) -> None:
    """And has all of it there: plugin, strategies, callbacks, command line, clipping, checkpoints, what is refused."""
    found = outcome(tmp_path, package)
    assert found["imported"] == [package.partition(".")[0]]
    held = found[package]
    assert 'Trainer(strategy="accel")' in held.pop("refused")
    assert held == {**HELD, "resumed": [STEPS] * 2}


@pytest.mark.parametrize(
    "order", [("pytorch_lightning", "lightning.pytorch"), ("lightning.pytorch", "pytorch_lightning")]
)
def test_both_packages_work_in_one_process(tmp_path: Path, order: tuple[str, str]) -> None:
    """Each resumes what the other has saved, with the plugin and without it."""
    found = outcome(tmp_path, *order)
    for package in order:
        held = found[package]
        assert 'Trainer(strategy="accel")' in held.pop("refused")
        assert held == {**HELD, "resumed": [STEPS] * 4}


def test_a_name_that_the_program_has_made_an_alias_of_the_other_is_one_package(tmp_path: Path) -> None:
    """As users do who want code of one package in a program of the other."""
    program = """
import sys
import lightning.pytorch
sys.modules["pytorch_lightning"] = lightning.pytorch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning_accel import AccelPlugin
plugin = AccelPlugin(precision="32-true")
lightning.pytorch.Trainer(plugins=[plugin], max_steps=2, logger=False, enable_checkpointing=False).fit(BoringModel())
print(plugin.report.summary())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "lightning-accel on" in done.stdout
