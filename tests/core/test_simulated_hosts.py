"""Training by the decisions of machines that are not at hand.

Simulated: what is decided is another machine's, the arithmetic is this CPU's. It shows that a run begins, trains and
ends with what a host allows, and goes without the rest; not that the host's own kernels are right.
"""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_accel.assembly import AcceleratedModel, accelerate
from lightning_accel.cli.decisions import ExampleModel
from lightning_accel.core.host import Host
from lightning_accel.core.report import AccelError, AccelWarning
from lightning_accel.experiment import trial
from lightning_accel.settings import Plan
from support.simulated_hosts import SIMULATED_HOSTS, when_asked

pytestmark = pytest.mark.numbers

ASKED_FOR = {"gradient_checkpointing": "full", "activation_offloading": "disk", "sparse_activations": "auto"}
NOTHING: dict[str, Any] = {
    "precision": "32-true",  # a simulated card has no autocast region to enter
    "flash_attention": "off",
    "inplace_activations": False,
    "memory_format": "off",
}

every_host = pytest.mark.parametrize("host", SIMULATED_HOSTS.values(), ids=SIMULATED_HOSTS)
one_of_each_kind = pytest.mark.parametrize("name", ["MI300X", "TPU v5", "M3"])  # of those that no other test runs on


@pytest.fixture(autouse=True)
def _timed_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(trial, "PAIRS", 1)
    yield
    torch._dynamo.reset()


def trained(model: nn.Module, handle: AcceleratedModel | None, steps: int = 3) -> list[float]:
    """The losses of some steps on the same batch."""
    torch.manual_seed(0)
    images, labels = torch.randn(8, 3, 16, 16), torch.randint(10, (8,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for step in range(steps):
        torch.manual_seed(step)
        optimizer.zero_grad()
        if handle is None:
            loss = F.cross_entropy(model(images), labels)
        else:
            with handle.step():
                loss = F.cross_entropy(model(handle.batch(images)), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@one_of_each_kind
def test_with_the_defaults_a_strict_run_trains_and_ends_as_a_plain_one(name: str) -> None:
    """What is on by default and not for a host is no warning, and with ``strict=True`` no error."""
    # Without a compiler: building flex's kernel, only to find that it is none for a CPU, takes long.
    host = dataclasses.replace(SIMULATED_HOSTS[name], compiler=None)
    plain = ExampleModel()
    model = copy.deepcopy(plain)
    handle = accelerate(model, Plan(precision="32-true", strict=True), host=host)
    assert trained(model, handle) == pytest.approx(trained(plain, None), rel=1e-4)
    assert handle.report.notes == []
    handle.undo()
    assert not any("forward" in vars(module) for module in model.modules())


@one_of_each_kind
def test_all_that_is_asked_for_trains_but_for_what_is_not_to_be_had_each_a_warning(name: str) -> None:
    host = SIMULATED_HOSTS[name]
    plain = ExampleModel()
    model = copy.deepcopy(plain)
    forecasts = when_asked(host, model)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", AccelWarning)
        handle = accelerate(model, Plan().replace(**NOTHING, **ASKED_FOR), host=host)
    assert trained(model, handle) == pytest.approx(trained(plain, None), rel=1e-5)
    for setting, value in ASKED_FOR.items():
        is_had = forecasts[f"{setting}: {value}"].acts
        assert handle.report.of(setting).is_on is is_had
        assert sum(str(warning.message).startswith(f"{setting}: ") for warning in said) == (not is_had)
    handle.undo()


@every_host
@pytest.mark.parametrize("name", ["gradient_checkpointing", "activation_offloading", "sparse_activations", "compile"])
def test_strict_makes_an_error_of_what_is_not_to_be_had(host: Host, name: str) -> None:
    setting = {**ASKED_FOR, "compile": "on"}[name]
    forecast = when_asked(host, ExampleModel())[f"{name}: {setting}"]
    with nullcontext() if forecast.acts else pytest.raises(AccelError, match=rf"{name}: .*\(strict=True\)"):
        accelerate(ExampleModel(), Plan().replace(**NOTHING, **{name: setting}, strict=True), host=host).undo()


TPU = SIMULATED_HOSTS["TPU v5"]


@pytest.mark.parametrize("name", ["flash_attention", "inplace_activations", "memory_format"])
def test_a_default_that_is_not_for_a_host_is_in_the_report_with_the_reason(name: str) -> None:
    handle = accelerate(ExampleModel(), Plan(), host=TPU)
    assert "XLA" in handle.report.of(name).status
    assert not handle.report.of(name).is_on
    handle.undo()


@pytest.mark.parametrize("settings", [{"memory_format": "channels_last"}, {"flash_attention": "sdpa"}])
def test_the_same_asked_for_by_name_is_a_warning(settings: dict[str, Any]) -> None:
    (name,) = settings
    with pytest.warns(AccelWarning, match=f"{name}: .*XLA"):
        accelerate(ExampleModel(), Plan().replace(**settings), host=TPU).undo()


def test_lightnings_xla_strategies_take_no_accel_plugin_and_the_error_names_the_one_they_take() -> None:
    """As docs/hosts.md says. Their own check, without a torch_xla, which making a whole strategy takes."""
    from lightning.pytorch.strategies import SingleDeviceXLAStrategy, XLAStrategy

    from lightning_accel import AccelPlugin

    for kind in (SingleDeviceXLAStrategy, XLAStrategy):
        strategy = object.__new__(kind)
        match = "can only work with the `XLAPrecision` plugin.*use lightning_accel.AccelXLAPlugin"
        with pytest.raises(TypeError, match=match):
            strategy.precision_plugin = AccelPlugin()
