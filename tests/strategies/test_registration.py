"""The names are known to Lightning once the package is imported, in whichever order."""

from __future__ import annotations

import subprocess
import sys

import pytest
from lightning.pytorch.strategies import StrategyRegistry

from lightning_accel.strategies import AccelDDPStrategy, AccelFSDPStrategy, AccelStrategy
from lightning_accel.strategies.registration import register_strategies

CLASSES = {"accel": AccelStrategy, "accel_ddp": AccelDDPStrategy, "accel_fsdp": AccelFSDPStrategy}
IMPORTED_FIRST = """
import sys, lightning_accel
import lightning.pytorch.strategies as home
ours = [finder for finder in sys.meta_path if type(finder).__module__.startswith("lightning_accel")]
print(type(home.__loader__).__name__, home.__spec__.loader is home.__loader__, len(ours))
print(*[name for name in home.StrategyRegistry.available_strategies() if name.startswith("accel")])
"""


def test_names_are_registered_when_lightning_is_imported_later() -> None:
    """And Lightning's module is loaded as it would be without us."""
    command = [sys.executable, "-W", "ignore", "-c", IMPORTED_FIRST]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["SourceFileLoader", "True", "0", *CLASSES]


@pytest.mark.parametrize("name", CLASSES)
def test_names_are_registered_at_once_when_lightning_is_there(name: str) -> None:
    before = StrategyRegistry.pop(name)
    register_strategies()
    assert name in StrategyRegistry.available_strategies()
    StrategyRegistry[name] = before


@pytest.mark.parametrize("name", CLASSES)
def test_a_name_stands_for_its_class(name: str) -> None:
    assert type(StrategyRegistry.get(name)) is CLASSES[name]
