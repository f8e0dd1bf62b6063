"""Claims 18 and 19, about AMD GPUs and TPUs: what is said without one, and what would be measured, on this CPU."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from lightning_accel import Plan
from lightning_accel.claims import row_18_rocm, row_19_xla
from lightning_accel.claims.claim import NotHereError, verdict_of
from lightning_accel.cli.decisions import ExampleModel
from lightning_accel.experiment import trial


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(trial, "PAIRS", 1)
    monkeypatch.setattr(row_18_rocm, "STEPS", 4)
    yield
    torch._dynamo.reset()


@pytest.mark.skipif(torch.version.hip is not None, reason="with an AMD GPU there is something to measure")
def test_without_an_amd_gpu_claim_18_says_what_it_takes() -> None:
    with pytest.raises(NotHereError, match="needs an AMD GPU and torch for ROCm"):
        list(row_18_rocm.measure())


def test_without_a_tpu_claim_19_says_what_it_takes() -> None:
    with pytest.raises(NotHereError, match="needs a TPU, and a torch_xla"):
        list(row_19_xla.measure())


@pytest.mark.medium
def test_where_there_is_a_tpu_the_losses_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated: the TPU is this CPU."""
    syncs = []
    torch_xla, runtime = ModuleType("torch_xla"), ModuleType("torch_xla.runtime")
    vars(torch_xla).update(device=lambda: torch.device("cpu"), sync=lambda: syncs.append("a step"))
    vars(runtime).update(device_type=lambda: "TPU")
    monkeypatch.setitem(sys.modules, "torch_xla", torch_xla)
    monkeypatch.setitem(sys.modules, "torch_xla.runtime", runtime)
    figures = list(row_19_xla.measure())
    assert len(figures) == 2
    assert verdict_of(figures) == ("holds", "holds")
    assert len(syncs) == 3 * 4  # plain, and in two precisions


def test_losses_that_are_others_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    of_the_plan = row_18_rocm.losses

    def wrong(model: torch.nn.Module, plan: Plan | None, *more: object) -> list[float]:
        found = of_the_plan(model, None)
        return found if plan is None else [loss * 1.01 for loss in found]

    monkeypatch.setattr(row_18_rocm, "losses", wrong)
    figures = list(row_18_rocm.same_losses(torch.device("cpu")))
    assert verdict_of(figures) == ("holds when", "holds when the losses in bf16-mixed, next to a plain run's")


def test_what_is_trained_learns_and_is_left_as_a_plain_model() -> None:
    model = ExampleModel()
    plain = copy.deepcopy(model)
    found = row_18_rocm.losses(model, Plan(precision="32-true"))
    assert found == sorted(found, reverse=True)
    assert found[-1] < row_18_rocm.losses(plain, None)[0]
    assert not any("forward" in vars(module) for module in model.modules())
