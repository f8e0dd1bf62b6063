"""A module ``pynvml`` with cards that are simulated: no test of the CPU has a real one."""

from __future__ import annotations

import sys
from ctypes import c_uint
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest


class SimulatedError(Exception):
    """As NVML's, which has an exception for everything that a card cannot do."""


@dataclass
class SimulatedCard:
    """A card, or with ``whole`` an instance of it.

    Attributes:
        unsupported: Names of NVML's functions that it does not know.
    """

    uuid: str = "GPU-aaaa"
    whole: SimulatedCard | None = None
    is_divided: bool = False
    percent: int = 90
    used_mib: int = 1024
    power_mw: int = 300_000
    energy_mj: float = 1_000_000.0
    sm_mhz: int = 1_500
    celsius: int = 60
    reasons: int = 0
    unsupported: set[str] = field(default_factory=set)


class SimulatedNvml:
    """Stands for the module; only what is asked of it is there.

    Attributes:
        opened: How often it was initialised, less how often it was shut down.
    """

    def __init__(self, *cards: SimulatedCard, has_driver: bool = True) -> None:
        self.cards = cards
        self.opened = 0
        self.has_driver = has_driver

    def nvmlInit(self) -> None:  # noqa: N802
        if not self.has_driver:
            raise SimulatedError("NVML Shared Library Not Found")
        self.opened += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.opened -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> SimulatedCard:  # noqa: N802
        for card in self.cards:
            if card.uuid == uuid:
                return card
        raise SimulatedError("Not Found")

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, card: SimulatedCard) -> SimulatedCard:  # noqa: N802
        assert card.whole is not None
        return card.whole

    def __getattr__(self, name: str) -> Any:
        answers: dict[str, Any] = {
            "nvmlDeviceIsMigDeviceHandle": lambda card: c_uint(card.whole is not None),
            "nvmlDeviceGetMigMode": lambda card: [int(card.is_divided), int(card.is_divided)],
            "nvmlDeviceGetUtilizationRates": lambda card: SimpleNamespace(gpu=card.percent),
            "nvmlDeviceGetMemoryInfo": lambda card: SimpleNamespace(used=card.used_mib * 2**20),
            "nvmlDeviceGetPowerUsage": lambda card: card.power_mw,
            "nvmlDeviceGetTotalEnergyConsumption": lambda card: card.energy_mj,
            "nvmlDeviceGetClockInfo": lambda card, kind: {1: card.sm_mhz}[kind],
            "nvmlDeviceGetTemperature": lambda card, sensor: {0: card.celsius}[sensor],
            "nvmlDeviceGetCurrentClocksEventReasons": lambda card: card.reasons,
            "nvmlDeviceGetCurrentClocksThrottleReasons": lambda card: card.reasons,
        }
        if name not in answers:
            raise AttributeError(name)

        def ask(card: SimulatedCard, *args: int) -> Any:
            if name in card.unsupported:
                raise SimulatedError("Not Supported")
            return answers[name](card, *args)

        return ask


def install(monkeypatch: pytest.MonkeyPatch, *cards: SimulatedCard, has_driver: bool = True) -> SimulatedNvml:
    """Puts it in the place of ``pynvml`` for a test."""
    nvml = SimulatedNvml(*cards, has_driver=has_driver)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)  # type: ignore[arg-type]
    return nvml
