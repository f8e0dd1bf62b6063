"""``ExportBest``: the best checkpoint of a fit as a file, and a fit that ends well where there can be none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_accel import AccelPlugin
from lightning_accel.callbacks import ExportBest
from support.lightning_models import Supervised, mlp

pytestmark = pytest.mark.numbers


def data() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(16, 8), torch.randint(4, (16,))), batch_size=4)


def keeper() -> ModelCheckpoint:
    return ModelCheckpoint(dirpath="kept", monitor="val_loss", filename="best")


class Worsening(Supervised):
    """Its validation loss is best after the first epoch."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", torch.tensor(float(self.current_epoch)))


def test_the_best_weights_and_not_the_last_are_exported_beside_the_checkpoint(
    make_trainer: Callable[..., Trainer],
) -> None:
    module, best = Worsening(mlp()), ExportBest()
    checkpointing = keeper()
    trainer = make_trainer(
        callbacks=[checkpointing, best], plugins=[AccelPlugin()], max_epochs=2, enable_checkpointing=True
    )
    trainer.fit(module, data(), data())
    assert best.exported.path == Path("kept/best.pt2").resolve()
    x = torch.randn(7, 8)
    kept = Supervised(mlp())
    kept.load_state_dict(torch.load("kept/best.ckpt", weights_only=False)["state_dict"])
    with torch.no_grad():
        torch.testing.assert_close(best.exported.load()(x), kept(x))
        assert not torch.equal(module(x), kept(x))
    assert module.trainer is trainer


def test_a_model_that_the_form_cannot_hold_is_said_and_the_fit_ends_well(
    make_trainer: Callable[..., Trainer], capsys: pytest.CaptureFixture[str]
) -> None:
    class Gate(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else 2 * x

    best, plugin = ExportBest("pt2"), AccelPlugin(tune="off")
    trainer = make_trainer(callbacks=[keeper(), best], plugins=[plugin], enable_checkpointing=True)
    trainer.fit(Supervised(nn.Sequential(mlp(), Gate())), data(), data())
    assert trainer.state.finished
    assert best.exported is None
    (said,) = [note for note in plugin.report.notes if "ExportBest" in note]
    assert "has written nothing" in said
    assert "test_export_best.py:" in said


def test_without_a_best_checkpoint_it_is_said_what_it_takes(make_trainer: Callable[..., Trainer]) -> None:
    best, plugin = ExportBest(), AccelPlugin(tune="off")
    make_trainer(callbacks=[best], plugins=[plugin]).fit(Supervised(mlp()), data(), data())
    assert best.exported is None
    assert any("ModelCheckpoint(monitor=...)" in note for note in plugin.report.notes)


def test_a_form_that_does_not_exist_is_an_error_before_the_fit() -> None:
    with pytest.raises(ValueError, match=r"form='onyx'; did you mean 'onnx'"):
        ExportBest("onyx")
