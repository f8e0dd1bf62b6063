"""A step in parts: what it takes, what it returns, what it logs, and which hooks are called, are those of a whole one.

Memory is simulated: see test_split_batches.py.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_accel import AccelPlugin
from lightning_accel.core.report import AccelWarning
from support.plugin.tight import (
    FITS,
    Batches,
    MakeTrainer,
    Reads,
    Sample,
    Tight,
    assert_same,
    fit,
    vectors,
)

pytestmark = pytest.mark.numbers


# -- batches and outputs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        vectors,
        lambda size: (vectors(size), torch.arange(size)),
        lambda size: {"x": vectors(size), "name": "train", "temperature": torch.tensor(0.5)},
        lambda size: Sample(vectors(size), 0.5, [str(index) for index in range(size)]),
    ],
    ids=["tensor", "tuple", "dict", "dataclass"],
)
def test_batches_of_every_kind_are_split(make_trainer: MakeTrainer, make: Callable[[int], Any]) -> None:
    plain, *_ = fit(make_trainer, Reads(), Batches(make))
    model, *_ = fit(make_trainer, Reads(FITS), Batches(make))
    assert_same(model, plain)


class Returns(Tight):
    """Extras beside the loss, all of which are kept."""

    def __init__(self, most: float = math.inf) -> None:
        super().__init__(most)
        self.outputs: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        predictions = self.predictions(batch)
        return {"loss": predictions.square().mean(), "predictions": predictions, "size": len(batch)}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.outputs.append(outputs)
        assert not outputs["loss"].requires_grad
        assert len(outputs["predictions"]) == len(batch)


def test_outputs_for_each_sample_are_put_together_and_others_are_the_last_parts(make_trainer: MakeTrainer) -> None:
    plain, *_ = fit(make_trainer, Returns())
    model, *_ = fit(make_trainer, Returns(FITS))
    assert_same(model, plain)
    for ours, theirs in zip(model.outputs, plain.outputs, strict=True):
        torch.testing.assert_close(ours["predictions"], theirs["predictions"].detach(), rtol=1e-9, atol=1e-9)
    assert [one["size"] for one in model.outputs] == [2, 2, 2, 1, 2]


class Skips(Tight):
    """Has no loss for batches that end with a mark."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        return None if float(batch[-1, 0]) == 9.0 else loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]) if outputs else math.nan)


def marked(*at: int) -> Callable[[int], Tensor]:
    def make(size: int) -> Tensor:
        batch = vectors(size)
        batch[[index for index in at if index < size], 0] = 9.0
        return batch

    return make


def test_parts_without_a_loss_add_nothing(make_trainer: MakeTrainer) -> None:
    model, *_ = fit(make_trainer, Skips(FITS), Batches(marked(4), [2, 5]))
    expected, *_ = fit(make_trainer, Tight(), Batches(sizes=[2]))
    x = vectors_of_second_batch()
    loss = float(expected.net(x[:3]).square().mean().detach()) * 3 / 5
    torch.testing.assert_close(model.losses[1], loss, rtol=1e-9, atol=1e-9)
    assert model.optimizers().optimizer.state[model.net[0].weight]["step"] == 2


def vectors_of_second_batch() -> Tensor:
    torch.manual_seed(1)
    vectors(2)
    return vectors(5)


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_a_step_all_parts_of_which_have_no_loss_is_skipped(make_trainer: MakeTrainer) -> None:
    model, *_ = fit(make_trainer, Skips(FITS), Batches(marked(2, 4), [2, 5]))
    assert math.isnan(model.losses[1])


# -- what Lightning shows, counts and calls -----------------------------------------------------------------------


class Logs(Tight):
    def __init__(self, most: float = math.inf) -> None:
        super().__init__(most)
        self.shown: list[dict[str, float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("step", loss, on_step=True, on_epoch=False)
        self.log("epoch", loss, on_step=False, on_epoch=True)
        self.log("samples", float(len(batch)), on_step=False, on_epoch=True, reduce_fx="sum")
        return loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.shown.append({name: float(value) for name, value in self.trainer.callback_metrics.items()})


def test_logged_means_are_over_samples_in_the_step_and_in_the_epoch(make_trainer: MakeTrainer) -> None:
    plain, there, _ = fit(make_trainer, Logs())
    model, here, _ = fit(make_trainer, Logs(FITS))
    torch.testing.assert_close(model.shown, plain.shown, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(dict(here.callback_metrics), dict(there.callback_metrics), rtol=1e-6, atol=1e-6)


class Counts(Tight):
    def __init__(self, most: float = math.inf) -> None:
        super().__init__(most)
        self.hooks: list[str] = []
        self.backward_calls = 0
        self.gradients: list[float] = []

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self.backward_calls += 1
        super().backward(loss, *args, **kwargs)

    def on_before_backward(self, loss: Tensor) -> None:
        self.hooks.append(f"before backward {float(loss.detach()):.6f}")

    def on_after_backward(self) -> None:
        self.gradients.append(sum(float(p.grad.sum()) for p in self.parameters() if p.grad is not None))
        self.hooks.append("after backward")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.hooks.append("before step")


def test_hooks_around_the_backward_pass_are_called_once_with_what_belongs_to_the_whole(
    make_trainer: MakeTrainer,
) -> None:
    plain, *_ = fit(make_trainer, Counts())
    model, *_ = fit(make_trainer, Counts(FITS))
    assert model.hooks == plain.hooks
    torch.testing.assert_close(model.gradients, plain.gradients, rtol=1e-9, atol=1e-9)
    assert (plain.backward_calls, model.backward_calls) == (5, 8)


class Schedules(Tight):
    def __init__(self, most: float = math.inf) -> None:
        super().__init__(most)
        self.validated: list[float] = []

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.05)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val", "interval": "epoch"}}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.net(batch).square().mean()
        self.validated.append(float(loss))
        self.log("val", loss)


def test_steps_schedulers_validations_and_checkpoints_are_those_of_whole_batches(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    def run(most: float) -> tuple[Schedules, Trainer, ModelCheckpoint]:
        saves = ModelCheckpoint(tmp_path / str(most), monitor="val")
        plugin = AccelPlugin(precision="32-true", memory={"on_oom": "split"}, report=False)
        trainer = make_trainer(plugins=[plugin], callbacks=[saves], max_epochs=2, enable_checkpointing=True)
        model = Schedules(most)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", AccelWarning)
            trainer.fit(*(model, *(DataLoader(Batches(), batch_size=None) for _ in range(2))))
        return model, trainer, saves

    (plain, there, theirs), (model, here, ours) = run(math.inf), run(FITS)
    assert_same(model, plain)
    torch.testing.assert_close(model.validated, plain.validated, rtol=1e-9, atol=1e-9)
    assert here.global_step == there.global_step == 10
    assert model.optimizers().param_groups[0]["lr"] == plain.optimizers().param_groups[0]["lr"] < 0.05
    assert Path(ours.best_model_path).name == Path(theirs.best_model_path).name
