"""The user's tensors with the memory of a weight, a gradient or an activation stay so, whatever the layout."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lightning_accel import AccelPlugin
from support.edges import Net, run

pytestmark = pytest.mark.numbers


class Averages(Callback):
    """Keeps a moving average of weights, which it reads by tensors that it got once."""

    def __init__(self, got_in: str = "on_fit_start", by: str = "state_dict") -> None:
        setattr(self, got_in, self.get)
        self.by = by
        self.read: dict[str, Tensor] = {}

    def get(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        weights = pl_module.state_dict() if self.by == "state_dict" else dict(pl_module.named_parameters())
        self.read = self.read or {name: weight.data for name, weight in weights.items()}
        self.average = {name: weight.clone() for name, weight in self.read.items()}

    def on_train_batch_end(self, *args: Any) -> None:
        for name, weight in self.read.items():
            self.average[name].lerp_(weight, 0.3)


@pytest.mark.parametrize("by", ["state_dict", "data"])
@pytest.mark.parametrize("got_in", ["on_fit_start", "on_train_start", "on_train_epoch_end", "on_validation_start"])
def test_weights_are_followed_by_what_a_callback_keeps_of_them(got_in: str, by: str) -> None:
    averages = Averages(got_in, by), Averages(got_in, by)
    run(Net, None, callbacks=[averages[0]])
    plugin = AccelPlugin(precision="32-true", report=False, trust="checked")
    run(Net, plugin, callbacks=[averages[1]])
    torch.testing.assert_close(averages[1].average, averages[0].average, rtol=1e-4, atol=1e-5)
    assert "something else has the memory" in plugin.report.of("memory_format").status


class EvaluatesAverages(Callback):
    """Puts its averages in place of the weights for every validation, and the weights back."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.averages = {name: weight.data.clone() for name, weight in pl_module.named_parameters()}
        self.losses: list[Tensor] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        for name, weight in pl_module.named_parameters():
            self.averages[name] = torch.lerp(self.averages[name], weight.data, 0.3)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.weights = {name: weight.data for name, weight in pl_module.named_parameters()}
        for name, weight in pl_module.named_parameters():
            weight.data = self.averages[name]

    def on_validation_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *args: Any) -> None:
        self.losses.append(outputs)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for name, weight in pl_module.named_parameters():
            weight.data = self.weights[name]
        self.weights = {}


def test_averages_may_take_the_place_of_weights_for_an_evaluation() -> None:
    plain, averages = EvaluatesAverages(), EvaluatesAverages()
    run(Net, None, callbacks=[plain])
    plugin = AccelPlugin(precision="32-true", report=False, trust="checked")
    run(Net, plugin, callbacks=[averages])
    torch.testing.assert_close(averages.losses, plain.losses, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(averages.averages, plain.averages, rtol=1e-4, atol=1e-5)
    assert plugin.report.of("memory_format").is_on


class LeavesACycle(Callback):
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        found: list[Any] = [pl_module.state_dict()]
        found.append(found)


def test_what_is_garbage_holds_no_weight() -> None:
    plugin = AccelPlugin(precision="32-true", report=False, trust="checked")
    gc.disable()  # as if it were not the collector's time yet
    try:
        run(Net, plugin, callbacks=[LeavesACycle()])
    finally:
        gc.enable()
    assert plugin.report.of("memory_format").is_on


class HasFlatGradients(Net):
    """Accumulates into views of one buffer, whose norm it clips."""

    def on_train_start(self) -> None:
        weights = [*self.parameters()]
        self.flat = torch.zeros(sum(weight.numel() for weight in weights))
        for weight, part in zip(weights, self.flat.split([w.numel() for w in weights]), strict=True):
            weight.grad = part.view_as(weight)

    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        self.flat.mul_(0.1 / self.flat.norm())

    def optimizer_zero_grad(self, *args: Any) -> None:
        self.flat.zero_()

    on_validation_model_zero_grad = optimizer_zero_grad


def test_gradients_stay_parts_of_the_users_buffer() -> None:
    plain = run(HasFlatGradients, None)
    plugin = AccelPlugin(precision="32-true", report=False, trust="checked")
    model = run(HasFlatGradients, plugin)
    torch.testing.assert_close(model.losses, plain.losses, rtol=1e-4, atol=1e-5)
    assert "something else has the memory" in plugin.report.of("memory_format").status


class WritesThroughAView(Net):
    """Writes to a view of the activation in a plain run, and would write to a copy in channels_last."""

    def features(self, x: Tensor) -> Tensor:
        features = self.conv(x)
        features.view(len(features), -1)[:, ::2] = 0.0
        return self.activation(features)


class WritesToTheFlattened(Net):
    def features(self, x: Tensor) -> Tensor:
        features = self.conv(x)
        features.flatten(1)[:, ::2] = 0.0
        return self.activation(features)


class WritesToACopy(Net):
    """Its copy is none in channels_last."""

    def features(self, x: Tensor) -> Tensor:
        features = self.activation(self.conv(x))
        rows = (features + 1).permute(0, 2, 3, 1)
        changed = rows.contiguous().mul_(0.5)
        return features + (changed - rows).permute(0, 3, 1, 2)


@pytest.mark.parametrize("kind", [WritesThroughAView, WritesToTheFlattened, WritesToACopy])
def test_a_step_that_writes_to_what_a_layout_copies_is_a_plain_one(kind: type[Net]) -> None:
    plain = run(kind, None)
    plugin = AccelPlugin(precision="32-true", report=False, trust="checked")
    model = run(kind, plugin)
    torch.testing.assert_close(model.losses, plain.losses)
    assert "channels_last" in plugin.report.of("memory_format").status


class ReadsThroughAView(Net):
    def features(self, x: Tensor) -> Tensor:
        features = super().features(x)
        self.mean = features.view(len(features), -1).mean()
        return features


def test_a_step_that_only_reads_through_a_view_runs_once() -> None:
    plugin = AccelPlugin(precision="32-true", report=False, trust="checked")
    model = run(ReadsThroughAView, plugin)
    assert "calls .view()" in plugin.report.of("memory_format").status
    assert not any("ran without memory_format" in note for note in plugin.report.notes)
    assert len(model.losses) == 2 * 8


class SumsByColumn(Net):
    """Keeps sums over a validation, and a view of them in another order of dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.totals: list[float] = []

    def on_validation_epoch_start(self) -> None:
        self.sums = torch.zeros(4, 8, 6, 6)
        self.by_column = self.sums.permute(0, 3, 1, 2)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.sums += self.features(batch[0])[:4, :8, :6, :6].detach().float().abs()

    def on_validation_epoch_end(self) -> None:
        self.totals.append(float(self.by_column.sum()))


def test_a_users_view_in_another_order_of_dimensions_stays_a_view() -> None:
    plain = run(SumsByColumn, None)
    model = run(SumsByColumn, AccelPlugin(precision="32-true", report=False, trust="checked"))
    assert model.totals == pytest.approx(plain.totals, rel=1e-4)
    assert model.totals[-1] > 0
