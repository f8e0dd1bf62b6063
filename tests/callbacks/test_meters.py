"""The energy meter, against a card that is simulated."""

from __future__ import annotations

import pytest
import torch

from lightning_accel.callbacks._meters import EnergyMeter


class SimulatedCard:
    """Stands for the module ``pynvml``; its counter is in millijoules."""

    def __init__(self) -> None:
        self.spent_mj = 1_000_000.0
        self.is_there = True

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: object) -> float:  # noqa: N802
        if not self.is_there:
            raise RuntimeError("NVML: not supported")
        return self.spent_mj


@pytest.fixture
def card() -> SimulatedCard:
    return SimulatedCard()


@pytest.fixture
def meter(card: SimulatedCard) -> EnergyMeter:
    return EnergyMeter(card, "a handle")


def test_energy_is_counted_from_the_restart(meter: EnergyMeter, card: SimulatedCard) -> None:
    for _ in range(2):
        meter.restart()
        card.spent_mj += 5_000
        assert meter.joules() == 5


def test_energy_of_a_pause_is_left_out(meter: EnergyMeter, card: SimulatedCard) -> None:
    meter.restart()
    card.spent_mj += 5_000
    meter.pause()
    card.spent_mj += 80_000
    meter.resume()
    card.spent_mj += 2_000
    assert meter.joules() == 7


def test_energy_is_unknown_once_the_card_does_not_answer(meter: EnergyMeter, card: SimulatedCard) -> None:
    meter.restart()
    card.is_there = False
    assert meter.joules() is None


def test_a_cpu_has_no_energy_counter() -> None:
    meter = EnergyMeter.open(torch.device("cpu"))
    meter.restart()
    assert meter.joules() is None
    meter.close()
