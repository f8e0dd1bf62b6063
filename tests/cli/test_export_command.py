"""``lightning-accel export``, of a checkpoint that a Trainer has written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer

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
"""


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


def test_what_is_missing_is_said_and_the_status_is_2(checkpoint, capsys: pytest.CaptureFixture[str]) -> None:
    path, model = checkpoint
    torch.save(torch.randn(3, 7), "other.pt")
    for arguments, message in (
        (["none.ckpt", "--model", model], "none.ckpt is no file"),
        ([path, "--model", model], "--example batch.pt"),
        ([path, "--model", "nowhere:Served"], "No module named 'nowhere'"),
        ([path, "--model", model, "--example", "none.pt"], "none.pt"),
        ([path, "--model", model, "--example", "other.pt", "--form", "onyx"], "did you mean 'onnx'"),
        ([path, "--model", model, "--example", "other.pt"], "cannot hold this model"),
    ):
        assert main(["export", *arguments]) == 2
        assert message in capsys.readouterr().err
