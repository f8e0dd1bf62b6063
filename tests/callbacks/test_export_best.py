"""``ExportBest``: the best checkpoint of a fit as a file, and a fit that ends well where there can be none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
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
from lightning_accel.deploy import MissingPackageError
from lightning_accel.deploy.combinations import HOLDS
from lightning_accel.deploy.destination import default_path
from lightning_accel.deploy.forms import FORMS
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


@pytest.mark.parametrize("precision", ["int8-dynamic", "int8-static"])
def test_the_best_weights_are_exported_in_int8_by_calibration_data(
    precision: Any, make_trainer: Callable[..., Trainer]
) -> None:
    best, plugin = ExportBest("torchscript", precision=precision, calibration=data()), AccelPlugin(trust="checked")
    trainer = make_trainer(callbacks=[keeper(), best], plugins=[plugin], enable_checkpointing=True)
    trainer.fit(Worsening(mlp()), data(), data())
    assert best.exported is not None, plugin.report.notes
    assert best.exported.path == Path(f"kept/best.{precision}.ts").resolve()


def test_a_model_that_the_form_cannot_hold_is_said_and_the_fit_ends_well(
    make_trainer: Callable[..., Trainer], capsys: pytest.CaptureFixture[str]
) -> None:
    class Gate(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else 2 * x

    best, plugin = ExportBest("pt2"), AccelPlugin(trust="checked")
    trainer = make_trainer(callbacks=[keeper(), best], plugins=[plugin], enable_checkpointing=True)
    trainer.fit(Supervised(nn.Sequential(mlp(), Gate())), data(), data())
    assert trainer.state.finished
    assert best.exported is None
    (said,) = [note for note in plugin.report.notes if "ExportBest" in note]
    assert "has written nothing" in said
    assert "test_export_best.py:" in said


def test_without_a_best_checkpoint_it_is_said_what_it_takes(make_trainer: Callable[..., Trainer]) -> None:
    best, plugin = ExportBest(), AccelPlugin(trust="checked")
    make_trainer(callbacks=[best], plugins=[plugin]).fit(Supervised(mlp()), data(), data())
    assert best.exported is None
    assert any("ModelCheckpoint(monitor=...)" in note for note in plugin.report.notes)


@pytest.mark.parametrize(
    ("keepers", "expected", "said"),
    [
        ([("a", None), ("b", "loss")], "b", ""),
        ([("a", "loss"), ("b", "epoch")], "a", "is exported, the best by loss, and not"),
        ([("a", None)], "a", "no ModelCheckpoint monitors anything"),
    ],
)
def test_of_several_checkpoints_the_first_that_is_best_by_something_is_exported(
    keepers: list[tuple[str, str | None]], expected: str, said: str, make_trainer: Callable[..., Trainer]
) -> None:
    kept = [
        ModelCheckpoint(dirpath=folder, monitor=monitor, filename="best", save_last=monitor is None)
        for folder, monitor in keepers
    ]
    best, plugin = ExportBest(), AccelPlugin(trust="checked")

    class Logging(Supervised):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("loss", self(batch[0]).sum())

    make_trainer(callbacks=[*kept, best], plugins=[plugin], enable_checkpointing=True).fit(
        Logging(mlp()), data(), data()
    )
    assert best.exported.path.parent.name == expected
    notes = [note for note in plugin.report.notes if "ExportBest" in note]
    assert (notes == []) if not said else (said in notes[0])


def test_a_batch_that_does_not_say_what_forward_takes_asks_for_an_example(make_trainer: Callable[..., Trainer]) -> None:
    class Keyed(Supervised):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self(batch["pixels"]).sum()

    loader = DataLoader([{"pixels": torch.randn(8), "row": 1} for _ in range(4)], batch_size=2)
    best, plugin = ExportBest(), AccelPlugin(trust="checked")
    keep = ModelCheckpoint(dirpath="kept")
    make_trainer(callbacks=[keep, best], plugins=[plugin], enable_checkpointing=True).fit(Keyed(mlp()), loader)
    assert best.exported is None
    assert any("give ExportBest(example=...)" in note for note in plugin.report.notes)


class Pair(dict[str, Tensor]):
    """A batch that is made of two tensors, and of no other mapping."""

    refused = 0

    def __init__(self, *both: Tensor) -> None:
        if len(both) != 2:
            Pair.refused += 1
            raise TypeError("a pair is made of two")
        super().__init__(x=both[0], y=both[1])

    def to(self, *_: Any, **__: Any) -> Pair:
        return self


def test_a_batch_of_a_class_that_nobody_else_can_make_is_tried_once_and_ends_no_fit(
    make_trainer: Callable[..., Trainer],
) -> None:
    class Paired(Supervised):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self(batch["x"]).sum()

    loader = DataLoader(range(4), batch_size=2, collate_fn=lambda rows: Pair(torch.randn(2, 8), torch.zeros(2)))
    best = ExportBest()
    trainer = make_trainer(callbacks=[ModelCheckpoint(dirpath="kept"), best], enable_checkpointing=True)
    trainer.fit(Paired(mlp()), loader)
    assert (trainer.state.finished, best.exported) == (True, None)
    assert Pair.refused == 1


def test_a_checkpoint_without_its_frozen_part_is_exported_where_loading_is_not_strict(
    make_trainer: Callable[..., Trainer],
) -> None:
    class Partial(Worsening):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["state_dict"].pop("net.0.weight")

    module, best = Partial(mlp()), ExportBest()
    module.strict_loading = False
    module.net[0].weight.requires_grad_(False)
    make_trainer(callbacks=[keeper(), best], enable_checkpointing=True).fit(module, data(), data())
    x = torch.randn(7, 8)
    with torch.no_grad():
        torch.testing.assert_close(best.exported.load()(x), module(x))


def test_two_forms_with_one_ending_and_two_precisions_have_names_of_their_own() -> None:
    names = [default_path(Path("best.ckpt"), form, numbers) for form, held in HOLDS.items() for numbers in held]
    assert len(set(names)) == len(names)
    assert {"best.pt2", "best.aoti.pt2", "best.aoti.bf16.pt2", "best.int8-dynamic.onnx"} <= {
        str(name) for name in names
    }
    assert all(
        str(name).endswith(FORMS[form].ending)
        for name, form in zip(names, [form for form, held in HOLDS.items() for _ in held], strict=True)
    )


@pytest.mark.parametrize(
    ("settings", "error", "said"),
    [
        ({"form": "onyx"}, ValueError, r"form='onyx'; did you mean 'onnx'"),
        (
            {"form": "onnx", "precision": "int8-static"},
            ValueError,
            "precision='int8-static' takes its ranges from data: calib",
        ),
        ({"form": "openvino", "precision": "int8-static"}, ValueError, "int8-static is written as onnx, torchscript"),
        ({"form": "pt2", "dynamic": "x"}, ValueError, "dynamic='x'"),
    ],
)
def test_a_setting_that_cannot_be_is_an_error_before_the_fit(
    settings: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        ExportBest(**settings)


def test_a_package_that_is_missing_is_an_error_before_the_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FORMS, "pt2", replace(FORMS["pt2"], needs=("no_such_package",)))
    with pytest.raises(MissingPackageError, match="needs no_such_package"):
        ExportBest("pt2")
