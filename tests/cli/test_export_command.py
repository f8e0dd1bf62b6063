"""``lightning-accel export``, of a checkpoint that a Trainer has written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import LightningCLI
from torch.utils.data import DataLoader, TensorDataset

from lightning_accel.__main__ import main
from lightning_accel.deploy.combinations import HOLDS, NUMBERS
from lightning_accel.deploy.forms import FORMS

pytestmark = pytest.mark.numbers

PROGRAM = """
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch.utils.data import DataLoader, TensorDataset


class Served(LightningModule):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(width, 4)

    def forward(self, x):
        return self.layer(x).relu()

    def training_step(self, batch, batch_idx):
        return self(batch[0]).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Large(Served):
    def __init__(self, width: int = 6) -> None:
        super().__init__(width)
        self.layer = torch.nn.Sequential(torch.nn.Linear(width, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256))


class WithData(Large):
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.randn(32, 6)), batch_size=8)


class Data(LightningDataModule):
    def __init__(self, width: int, folder: str = "") -> None:
        super().__init__()
        self.save_hyperparameters()
        self.width, self.folder = width, folder

    def setup(self, stage):
        if self.folder:
            raise FileNotFoundError(f"no {self.folder} here")
        self.rows = torch.randn(32, self.width), torch.zeros(32)

    def train_dataloader(self):
        return DataLoader(TensorDataset(*self.rows), batch_size=8)


def batches():
    return [(torch.randn(8, 6), torch.zeros(8)) for _ in range(3)]
"""


class Data(LightningDataModule):
    """One batch."""

    def train_dataloader(self) -> DataLoader:
        return DataLoader(TensorDataset(torch.randn(4, 6)), batch_size=4)


@pytest.fixture
def checkpoint(make_trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch, request) -> tuple[str, str]:
    """A checkpoint, and the class that it is of, in a program in the working folder."""
    name = f"served_{abs(hash(request.node.name))}"
    Path(f"{name}.py").write_text(PROGRAM)
    monkeypatch.syspath_prepend(".")
    module = __import__(name).Served(width=6)
    trainer = make_trainer()
    trainer.strategy.connect(module)
    trainer.save_checkpoint("best.ckpt")
    return "best.ckpt", f"{name}:Served"


def test_a_checkpoint_becomes_a_file_beside_it(checkpoint, capsys: pytest.CaptureFixture[str]) -> None:
    path, model = checkpoint
    torch.save((torch.randn(3, 6), torch.zeros(3)), "batch.pt")
    assert main(["export", path, "--model", model, "--example", "batch.pt"]) == 0
    assert "any size: x: 0 (batch)" in capsys.readouterr().out
    found = FORMS["pt2"].load(Path("best.pt2"), torch.device("cpu"))(torch.randn(5, 6))
    assert found.shape == (5, 4)


def test_the_class_is_the_one_that_lightning_cli_has_noted_in_the_checkpoint(
    checkpoint, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, model = checkpoint
    monkeypatch.setattr("sys.argv", ["train.py"])
    saved = {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": {"dirpath": "kept"}}
    options = {"max_steps": 1, "logger": False, "accelerator": "cpu", "callbacks": [saved]}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    section = {"class_path": model.replace(":", "."), "init_args": {"width": 6}}
    given = {"seed_everything": False, "trainer": options | quiet, "model": section}
    command = LightningCLI(LightningModule, Data, subclass_mode_model=True, args=given, run=False)
    command.trainer.fit(command.model, command.datamodule)
    (path,) = Path("kept").iterdir()
    torch.save(torch.randn(3, 6), "example.pt")
    assert main(["export", str(path), "--example", "example.pt", "--out", "served.pt2"]) == 0
    assert "served.pt2: pt2" in capsys.readouterr().out


def test_the_class_is_the_one_in_config_yaml_in_the_folder_of_the_run(checkpoint) -> None:
    path, model = checkpoint
    Path("run/checkpoints").mkdir(parents=True)
    Path(path).rename("run/checkpoints/best.ckpt")
    Path("run/config.yaml").write_text(f"model:\n  class_path: {model.replace(':', '.')}\n")
    torch.save(torch.randn(3, 6), "example.pt")
    assert main(["export", "run/checkpoints/best.ckpt", "--example", "example.pt"]) == 0
    assert Path("run/checkpoints/best.pt2").exists()


@pytest.fixture
def large(checkpoint, make_trainer: Callable[..., Trainer]) -> Callable[[str], list[str]]:
    """The command for a checkpoint of another class of the program, with layers that are worth INT8."""
    module = checkpoint[1].partition(":")[0]

    def command(name: str = "Large") -> list[str]:
        trainer = make_trainer()
        trainer.strategy.connect(getattr(__import__(module), name)())
        trainer.save_checkpoint("large.ckpt")
        return ["export", "large.ckpt", "--model", f"{module}:{name}", "--data", f"{module}:batches"]

    return command


@pytest.mark.parametrize("precision", [numbers for numbers in HOLDS["onnx"] if numbers != "32"])
def test_a_file_has_smaller_numbers_and_computes_nearly_the_same(
    precision: str, large, capsys: pytest.CaptureFixture[str]
) -> None:
    """In every precision that the form is written with; the data are the example, too."""
    pytest.importorskip("onnxruntime", reason="pip install 'lightning-accel[deploy]'")
    command = [*large(), "--form", "onnx"]
    assert main([*command, "--out", "float.onnx"]) == 0
    assert main([*command, "--precision", precision]) == 0
    said = capsys.readouterr().out
    assert f"{precision}: 2 layers" in said
    assert f"large.onnx: onnx+{precision}" in said
    size, full = Path("large.onnx").stat().st_size, Path("float.onnx").stat().st_size
    assert size < (0.6 if precision == "fp16" else 0.4) * full
    x = torch.randn(5, 6)
    found, expected = (
        FORMS["onnx"].load(Path(name), torch.device("cpu"))(x)[0] for name in ("large.onnx", "float.onnx")
    )
    assert (found - expected).norm() < 0.05 * expected.norm()


def test_int8_by_every_calls_own_range_needs_no_data(large, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save(torch.randn(3, 6), "example.pt")
    command = [*large()[:-2], "--example", "example.pt", "--form", "torchscript", "--precision", "int8-dynamic"]
    assert main(command) == 0
    assert "error not measured: no calibration data" in capsys.readouterr().out


def test_ranges_are_of_the_data_module_that_the_run_has_noted(large, capsys: pytest.CaptureFixture[str]) -> None:
    command = [*large()[:-2], "--form", "torchscript", "--precision", "int8-static"]
    module = command[3].partition(":")[0]
    Path("config.yaml").write_text(f"data:\n  class_path: {module}.Data\n  init_args:\n    width: 6\n")
    assert main(command) == 0
    assert "int8-static: 2 layers" in capsys.readouterr().out
    Path("config.yaml").write_text(f"data:\n  class_path: {module}.Data\n  init_args: {{width: 6, folder: /gone}}\n")
    assert main(command) == 2
    said = capsys.readouterr().err
    assert "those of the run cannot be had here (FileNotFoundError: no /gone here): --data MODULE:FUNCTION" in said


def test_ranges_are_of_the_data_module_that_the_checkpoint_has_noted(
    checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["train.py"])
    name = checkpoint[1].partition(":")[0]
    options = {"max_steps": 1, "logger": False, "accelerator": "cpu", "callbacks": [], "enable_checkpointing": False}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    sections = {
        "model": {"class_path": f"{name}.Large"},
        "data": {"class_path": f"{name}.Data", "init_args": {"width": 6}},
    }
    given = {"seed_everything": False, "trainer": options | quiet, **sections}
    command = LightningCLI(
        LightningModule, LightningDataModule, subclass_mode_model=True, subclass_mode_data=True, args=given, run=False
    )
    command.trainer.fit(command.model, command.datamodule)
    command.trainer.save_checkpoint("noted.ckpt")
    assert main(["export", "noted.ckpt", "--form", "torchscript", "--precision", "int8-static"]) == 0


def test_ranges_are_of_the_models_own_training_data(large) -> None:
    command = [*large("WithData")[:-2], "--form", "torchscript", "--precision", "int8-static"]
    assert main(command) == 0
    assert Path("large.ts").exists()


def test_a_form_that_does_not_hold_a_precision_says_which_do(capsys: pytest.CaptureFixture[str]) -> None:
    for form, held in HOLDS.items():
        for precision in set(NUMBERS) - set(held):
            assert main(["export", "best.ckpt", "--form", form, "--precision", precision]) == 2
            said = capsys.readouterr().err
            assert f"form='{form}' is not written with precision='{precision}'. It is with {', '.join(held)}" in said


def test_help_names_the_precisions_of_each_form(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["export", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    for form, held in HOLDS.items():
        assert f"{form}: {', '.join(held)}" in said


def test_what_is_missing_is_said_and_the_status_is_2(checkpoint, capsys: pytest.CaptureFixture[str]) -> None:
    path, model = checkpoint
    torch.save(torch.randn(3, 7), "other.pt")
    for arguments, message in (
        (["none.ckpt", "--model", model], "none.ckpt is no file"),
        ([path], "--model package.module:Class"),
        ([path, "--model", model], "--example batch.pt"),
        ([path, "--model", "nowhere:Served"], "No module named 'nowhere'"),
        ([path, "--model", model, "--example", "none.pt"], "none.pt"),
        ([path, "--model", model, "--example", "other.pt", "--form", "onyx"], "did you mean 'onnx'"),
        ([path, "--model", model, "--example", "other.pt"], "cannot hold this model"),
        ([path, "--model", model, "--precision", "int8"], "precision='int8'; did you mean 'int8-"),
        ([path, "--model", model, "--form", "onnx", "--precision", "int8-static"], "names no data module, nor has"),
        ([path, "--model", model, "--data", "nowhere:batches"], "--data nowhere:batches"),
    ):
        assert main(["export", *arguments]) == 2
        assert message in capsys.readouterr().err
