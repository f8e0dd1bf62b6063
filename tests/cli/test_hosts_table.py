"""docs/hosts.md is what the techniques say of machines that are not at hand, and says it alike on every machine."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from hosts_page import page
from lightning_accel.cli.decisions import ExampleModel, forecasts
from lightning_accel.core.host import Host
from lightning_accel.settings import Plan
from support.simulated_hosts import SIMULATED_HOSTS, when_asked

ROOT = Path(__file__).parents[2]


@pytest.mark.medium
def test_the_page_is_what_the_code_decides() -> None:
    """To write it anew: python tests/hosts_page.py."""
    assert page() == (ROOT / "docs" / "hosts.md").read_text(encoding="utf-8")


@pytest.mark.medium
def test_the_machine_that_it_is_written_on_makes_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here: one with a card that torch sees, whose compilers are gone."""

    def asked(*args: object, **kwargs: object) -> object:
        raise AssertionError("the machine was asked")

    monkeypatch.setattr(shutil, "which", asked)
    monkeypatch.setattr(Host, "detect", asked)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", asked)
    assert page() == (ROOT / "docs" / "hosts.md").read_text(encoding="utf-8")


@pytest.mark.medium
def test_every_kind_of_host_is_on_the_page() -> None:
    assert {host.kind for host in SIMULATED_HOSTS.values()} == {"cuda", "rocm", "xla", "mps", "cpu"}
    assert [name for name in SIMULATED_HOSTS if f"\n### {name}\n" not in page()] == []


@pytest.mark.parametrize("name", SIMULATED_HOSTS)
def test_what_is_not_to_be_had_has_a_reason(name: str) -> None:
    model = ExampleModel()
    found = forecasts(Plan(), SIMULATED_HOSTS[name], model) | when_asked(SIMULATED_HOSTS[name], model)
    assert all(forecast.words for forecast in found.values())


def test_looking_leaves_the_model_as_it_was() -> None:
    model = ExampleModel()
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    forecasts(Plan(), SIMULATED_HOSTS["A100"], model)
    when_asked(SIMULATED_HOSTS["A100"], model)
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before
