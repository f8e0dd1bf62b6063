"""A second run of the same training, under a Trainer: what the first has tried is in force from the first step on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_accel import AccelPlugin
from lightning_accel.experiment.trial import Trial
from lightning_accel.settings import Plan

pytestmark = pytest.mark.numbers


class Attention(nn.Module):
    """Attention as tutorials write it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return self.out((q @ k.mT / 4.0).softmax(-1) @ v)


class Attending(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = Attention()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.attention(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(torch.ones(12, 6, 16), batch_size=2)


def fit(make_trainer: Callable[..., Any], **plan: Any) -> AccelPlugin:
    settings = {"flash_attention": {"backend": "auto", "force": ["Attention"]}, "inplace_activations": "off"}
    plugin = AccelPlugin.from_plan(Plan().replace(precision="32-true", report=False, **{**settings, **plan}))
    make_trainer(plugins=[plugin]).fit(Attending())
    return plugin


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> list[Trial]:
    """Those whose numbers were compared."""
    compared: list[Trial] = []
    numbers = Trial.numbers

    def counting(trial: Trial, *args: Any, **options: Any) -> Any:
        compared.append(trial)
        return numbers(trial, *args, **options)

    monkeypatch.setattr(Trial, "numbers", counting)
    return compared


def test_nothing_is_tried_again(make_trainer: Callable[..., Any], trials: list[Trial]) -> None:
    first = fit(make_trainer)
    assert len(trials) > 0
    trials.clear()
    second = fit(make_trainer)
    assert trials == []
    for kind in ("applied", "refused"):
        assert getattr(second.report, kind)("flash_attention") == getattr(first.report, kind)("flash_attention")
    assert any("as tried by a run of this very program on" in note for note in second.report.notes)


def test_with_another_plan_it_is(make_trainer: Callable[..., Any], trials: list[Trial]) -> None:
    fit(make_trainer)
    trials.clear()
    fit(make_trainer, inplace_activations="auto")
    assert len(trials) > 0


def test_a_run_that_decides_nothing_by_whole_steps_tries_its_parts(
    make_trainer: Callable[..., Any], trials: list[Trial]
) -> None:
    fit(make_trainer)
    trials.clear()
    fit(make_trainer, trust="checked")
    assert len(trials) > 0
