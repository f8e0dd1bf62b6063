"""A step that is finite in float32 only does not spoil the weights of a run for which we chose bfloat16."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_accel import AccelPlugin
from lightning_accel.core.host import Host
from lightning_accel.lightning.finite_steps import NOT_FINITE

pytestmark = pytest.mark.numbers
MakeTrainer = Callable[..., Trainer]
seen: list[tuple[int, bool]] = []  # of each call of a step, its number and whether it ran in bfloat16


@pytest.fixture(autouse=True)
def _computes_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    seen.clear()
    host = Host(kind="cpu", device_name="a CPU with bfloat16", native_bf16=True)
    monkeypatch.setattr(Host, "detect", lambda device=None: host)


class FromFifth(LightningModule):
    """From its fifth step on it computes what bfloat16 cannot."""

    spoilt_from = 4

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 8)

    def spoilt(self, features: Tensor) -> Tensor:
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        seen.append((batch_idx, torch.is_autocast_enabled("cpu")))
        features = self.net(batch[0])
        return self.spoilt(features) if batch_idx >= self.spoilt_from else features.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.01)

    @property
    def is_finite(self) -> bool:
        return all(bool(parameter.isfinite().all()) for parameter in self.parameters())


class InfiniteLoss(FromFifth):
    def spoilt(self, features: Tensor) -> Tensor:
        probability = torch.sigmoid(features.mean() * 0 + 7)  # 0.9991, which is 1 in bfloat16
        return -torch.log(1 - probability) * features.square().mean()


class InfiniteGradients(FromFifth):
    def spoilt(self, features: Tensor) -> Tensor:
        cosine = features.mean() * 0.001 + 0.999  # 1 in bfloat16
        return torch.sqrt(1 - cosine**2)


class InfiniteAnyhow(FromFifth):
    def spoilt(self, features: Tensor) -> Tensor:
        return features.mean() * math.inf


class ByHand(InfiniteLoss):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        loss = super().training_step(batch, batch_idx)
        self.optimizers().zero_grad()
        self.manual_backward(loss)
        self.optimizers().step()


def fit(make_trainer: MakeTrainer, model: FromFifth, *, settings: Any = None, **trainer: Any) -> AccelPlugin:
    plugin = AccelPlugin(**({"trust": "checked"} if settings is None else settings))
    torch.manual_seed(0)
    data = DataLoader(TensorDataset(torch.rand(32, 8)), batch_size=4)
    make_trainer(plugins=[plugin], **trainer).fit(model, data)
    return plugin


@pytest.mark.parametrize("model", [InfiniteLoss, InfiniteGradients, ByHand])
def test_the_step_runs_again_in_float32_and_so_does_the_rest(make_trainer: MakeTrainer, model: type[FromFifth]) -> None:
    module = model()
    plugin = fit(make_trainer, module)
    assert seen == [*((i, True) for i in range(5)), *((i, False) for i in range(4, 8))]
    assert module.is_finite
    assert plugin.report.of("precision").status == f"32-true: {NOT_FINITE}"


def test_a_later_batch_of_an_accumulation_runs_again_too(make_trainer: MakeTrainer) -> None:
    module = InfiniteLoss()
    module.spoilt_from = 5
    fit(make_trainer, module, accumulate_grad_batches=4)
    assert module.is_finite
    assert seen[5:7] == [(5, True), (5, False)]


def test_a_loss_that_float32_does_not_make_finite_is_the_users_own(make_trainer: MakeTrainer) -> None:
    module = InfiniteAnyhow()
    plugin = fit(make_trainer, module)
    assert seen[4:] == [(4, True), (4, False), (5, True), (5, False), (6, True), (6, False), (7, True)]
    assert plugin.report.of("precision").is_on


def test_bfloat16_that_was_asked_for_by_name_is_not_questioned(make_trainer: MakeTrainer) -> None:
    module = InfiniteLoss()
    fit(make_trainer, module, settings={"trust": "checked", "precision": "bf16-mixed"})
    assert seen == [(i, True) for i in range(8)]
    assert not module.is_finite
