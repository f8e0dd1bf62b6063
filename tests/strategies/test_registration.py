"""The names are known to Lightning once the package is imported; ``test_packaging.py`` has the other order."""

from __future__ import annotations

import pytest
from lightning.pytorch.strategies import StrategyRegistry

from lightning_accel import AccelDDPStrategy, AccelFSDPStrategy, AccelStrategy
from lightning_accel.registration import register_strategies

CLASSES = {"accel": AccelStrategy, "accel_ddp": AccelDDPStrategy, "accel_fsdp": AccelFSDPStrategy}


@pytest.mark.parametrize("name", CLASSES)
def test_names_are_registered_at_once_when_lightning_is_there(name: str) -> None:
    before = StrategyRegistry.pop(name)
    register_strategies()
    assert name in StrategyRegistry.available_strategies()
    StrategyRegistry[name] = before


@pytest.mark.parametrize("name", CLASSES)
def test_a_name_stands_for_its_class(name: str) -> None:
    assert type(StrategyRegistry.get(name)) is CLASSES[name]
