"""The energy meter, against a card that is simulated."""

from __future__ import annotations

import pytest
import torch

from lightning_accel.callbacks._nvml import Card, EnergyMeter
from support.simulated_nvml import SimulatedCard, SimulatedNvml


@pytest.fixture
def card() -> SimulatedCard:
    return SimulatedCard()


@pytest.fixture
def meter(card: SimulatedCard) -> EnergyMeter:
    return EnergyMeter(Card(SimulatedNvml(card), card))


def test_energy_is_counted_from_the_restart(meter: EnergyMeter, card: SimulatedCard) -> None:
    for _ in range(2):
        meter.restart()
        card.energy_mj += 5_000
        assert meter.joules() == 5


def test_energy_of_a_pause_is_left_out(meter: EnergyMeter, card: SimulatedCard) -> None:
    meter.restart()
    card.energy_mj += 5_000
    meter.pause()
    card.energy_mj += 80_000
    meter.resume()
    card.energy_mj += 2_000
    assert meter.joules() == 7


def test_energy_is_unknown_once_the_card_does_not_answer(meter: EnergyMeter, card: SimulatedCard) -> None:
    meter.restart()
    card.unsupported.add("nvmlDeviceGetTotalEnergyConsumption")
    assert meter.joules() is None


def test_a_cpu_has_no_energy_counter() -> None:
    meter = EnergyMeter.open(torch.device("cpu"))
    meter.restart()
    assert meter.joules() is None
    meter.close()
