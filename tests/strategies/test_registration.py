"""The names are known to Lightning once the package is imported, in whichever order."""

from __future__ import annotations

import subprocess
import sys

import pytest
from lightning.pytorch.strategies import StrategyRegistry

from lightning_accel.strategies import AccelDDPStrategy, AccelFSDPStrategy, AccelStrategy

CLASSES = {"accel": AccelStrategy, "accel_ddp": AccelDDPStrategy, "accel_fsdp": AccelFSDPStrategy}
LISTED = """
from lightning.pytorch.strategies import StrategyRegistry
print(*[name for name in StrategyRegistry.available_strategies() if name.startswith("accel")])
"""


@pytest.mark.parametrize(
    "imports",
    ["import lightning_accel, lightning.pytorch", "import lightning.pytorch, lightning_accel"],
    ids=["before Lightning", "after Lightning"],
)
def test_the_names_are_registered(imports: str) -> None:
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", imports + LISTED], capture_output=True, text=True, check=True
    )
    assert run.stdout.split() == list(CLASSES)


@pytest.mark.parametrize("name", CLASSES)
def test_a_name_stands_for_its_class(name: str) -> None:
    assert type(StrategyRegistry.get(name)) is CLASSES[name]


ON_ITS_OWN = """
import sys, lightning_accel
import lightning.pytorch.strategies as home
ours = [finder for finder in sys.meta_path if type(finder).__module__.startswith("lightning_accel")]
print(type(home.__loader__).__name__, home.__spec__.loader is home.__loader__, len(ours))
"""


def test_lightning_s_module_is_loaded_as_it_would_be_without_us() -> None:
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", ON_ITS_OWN], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["SourceFileLoader", "True", "0"]
