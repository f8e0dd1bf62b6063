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
from lightning_accel.deploy.forms import FORMS

pytestmark = pytest.mark.numbers

PROGRAM = """
import torch
from lightning.pytorch import LightningModule


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
    ):
        assert main(["export", *arguments]) == 2
        assert message in capsys.readouterr().err
