"""``lightning-accel export``, of a checkpoint that a Trainer has written."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import LightningCLI

from lightning_accel.__main__ import main
from lightning_accel.deploy.combinations import HOLDS, NUMBERS
from lightning_accel.deploy.forms import FORMS
from support.served_program import Large, Served, WithData, save

pytestmark = pytest.mark.numbers

PROGRAM = "support.served_program"
MODEL = f"{PROGRAM}:Served"


@pytest.fixture
def checkpoint(make_trainer: Callable[..., Trainer]) -> str:
    """A checkpoint of the program's class."""
    save(make_trainer(), Served())
    return "best.ckpt"


@pytest.fixture
def large(make_trainer: Callable[..., Trainer]) -> list[str]:
    """The command for a checkpoint with layers that are worth INT8."""
    save(make_trainer(), Large(), "large.ckpt")
    return ["export", "large.ckpt", "--model", f"{PROGRAM}:Large"]


def test_a_checkpoint_becomes_a_file_beside_it(checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a class in the working folder."""
    Path("in_this_folder.py").write_text(f"from {PROGRAM} import Served as Mine\n")
    torch.save((torch.randn(3, 6), torch.zeros(3)), "batch.pt")
    assert main(["export", checkpoint, "--model", "in_this_folder:Mine", "--example", "batch.pt"]) == 0
    assert "any size: x: 0 (batch)" in capsys.readouterr().out
    found = FORMS["pt2"].load(Path("best.pt2"), torch.device("cpu"))(torch.randn(5, 6))
    assert found.shape == (5, 4)


def test_the_classes_are_those_that_lightning_cli_has_noted_in_the_checkpoint(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The module's, and the data module's, of which the ranges and the example are."""
    monkeypatch.setattr("sys.argv", ["train.py"])
    options = {"max_steps": 1, "logger": False, "accelerator": "cpu", "enable_checkpointing": False}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    sections = {
        name: {"class_path": f"{PROGRAM}.{kind}", "init_args": {"width": 6}}
        for name, kind in (("model", "Large"), ("data", "Data"))
    }
    given = {"seed_everything": False, "trainer": options | quiet, **sections}
    command = LightningCLI(
        LightningModule, LightningDataModule, subclass_mode_model=True, subclass_mode_data=True, args=given, run=False
    )
    command.trainer.fit(command.model, command.datamodule)
    command.trainer.save_checkpoint("noted.ckpt")
    assert main(["export", "noted.ckpt", "--form", "torchscript", "--precision", "int8-static"]) == 0
    assert "int8-static: 2 layers" in capsys.readouterr().out


def test_the_class_is_the_one_in_config_yaml_in_the_folder_of_the_run(checkpoint: str) -> None:
    Path("run/checkpoints").mkdir(parents=True)
    Path(checkpoint).rename("run/checkpoints/best.ckpt")
    Path("run/config.yaml").write_text(f"model:\n  class_path: {MODEL.replace(':', '.')}\n")
    torch.save(torch.randn(3, 6), "example.pt")
    assert main(["export", "run/checkpoints/best.ckpt", "--example", "example.pt"]) == 0
    assert Path("run/checkpoints/best.pt2").exists()


@pytest.mark.medium
@pytest.mark.parametrize(
    "precision",
    [
        pytest.param(numbers, marks=[pytest.mark.slow] * (numbers in ("int8-static", "int8-weight")))
        for numbers in HOLDS["onnx"]
        if numbers != "32"
    ],
)
def test_a_file_has_smaller_numbers_and_computes_nearly_the_same(
    precision: str, large: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """In every precision that the form is written with; the data are the example, too."""
    pytest.importorskip("onnxruntime", reason="pip install 'lightning-accel[deploy]'")
    command = [*large, "--data", f"{PROGRAM}:batches", "--form", "onnx"]
    assert main([*command, "--out", "float.onnx"]) == 0
    assert main([*command, "--precision", precision]) == 0
    said = capsys.readouterr().out
    assert f"{precision}: 2 layers" in said
    assert f"large.{precision}.onnx: onnx+{precision}" in said
    size, full = Path(f"large.{precision}.onnx").stat().st_size, Path("float.onnx").stat().st_size
    assert size < (0.6 if precision == "fp16" else 0.4) * full
    x = torch.randn(5, 6)
    found, expected = (
        FORMS["onnx"].load(Path(name), torch.device("cpu"))(x)[0] for name in (f"large.{precision}.onnx", "float.onnx")
    )
    assert (found - expected).norm() < 0.05 * expected.norm()


def test_int8_by_every_calls_own_range_needs_no_data(large: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    torch.save(torch.randn(3, 6), "example.pt")
    command = [*large, "--example", "example.pt", "--form", "torchscript", "--precision", "int8-dynamic"]
    assert main(command) == 0
    assert "error not measured: no calibration data" in capsys.readouterr().out


def test_ranges_are_of_the_data_module_that_the_run_has_noted(
    large: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    command = [*large, "--form", "torchscript", "--precision", "int8-static"]
    Path("config.yaml").write_text(f"data:\n  class_path: {PROGRAM}.Data\n  init_args:\n    width: 6\n")
    assert main(command) == 0
    assert "int8-static: 2 layers" in capsys.readouterr().out
    Path("config.yaml").write_text(f"data:\n  class_path: {PROGRAM}.Data\n  init_args: {{width: 6, folder: /gone}}\n")
    assert main(command) == 2
    said = capsys.readouterr().err
    assert "those of the run cannot be had here (FileNotFoundError: no /gone here at " in said
    assert "served_program.py:" in said
    assert "--data MODULE:FUNCTION" in said


def test_ranges_are_of_the_models_own_training_data(make_trainer: Callable[..., Trainer]) -> None:
    save(make_trainer(), WithData())
    command = ["export", "best.ckpt", "--model", f"{PROGRAM}:WithData"]
    assert main([*command, "--form", "torchscript", "--precision", "int8-static"]) == 0
    assert Path("best.int8-static.ts").exists()


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


def test_what_is_missing_is_said_and_the_status_is_2(checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    path, model = checkpoint, MODEL
    torch.save(torch.randn(3, 7), "other.pt")
    for arguments, message in (
        (["none.ckpt", "--model", model], "none.ckpt is no file"),
        ([path], "--model package.module:Class"),
        ([path, "--model", model], "--example batch.pt"),
        ([path, "--model", "nowhere:Served"], "No module named 'nowhere'"),
        ([path, "--model", model, "--example", "none.pt"], "none.pt"),
        ([path, "--model", model, "--example", "other.pt", "--form", "onyx"], "did you mean 'onnx'"),
        ([path, "--model", model, "--example", "other.pt"], "the model itself fails on the example, (3, 7), at"),
        ([path, "--model", model, "--precision", "int8"], "precision='int8'; did you mean 'int8-"),
        ([path, "--model", model, "--form", "onnx", "--precision", "int8-static"], "names no data module, nor has"),
        ([path, "--model", model, "--data", "nowhere:batches"], "--data nowhere:batches"),
    ):
        assert main(["export", *arguments]) == 2
        assert message in capsys.readouterr().err


def test_what_is_read_is_not_written_over(checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    """By its name or through a link, before anything is done."""
    torch.save(torch.randn(3, 6), "example.pt")
    Path("in_this_folder.py").write_text("")
    Path("link.ckpt").symlink_to(checkpoint)
    before = Path(checkpoint).read_bytes()
    for out in (checkpoint, "link.ckpt", "example.pt", "in_this_folder.py"):
        names = ["--model", "in_this_folder:Served", "--example", "example.pt", "--out", out]
        assert main(["export", checkpoint, *names]) == 2
        assert f"{out} would replace" in capsys.readouterr().err
    assert Path(checkpoint).read_bytes() == before


@pytest.mark.medium
def test_a_file_that_cannot_be_read_is_named_and_the_status_is_2(
    checkpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = Path(checkpoint).read_bytes()
    for name, content in (("cut", whole[:2000]), ("text", b"hello"), ("empty", b"")):
        Path(name).write_bytes(content)
        for given in ([name, "--model", MODEL], [name], [checkpoint, "--model", MODEL, "--example", name]):
            assert main(["export", *given]) == 2
            assert f"export: {name} is no file of torch.save, or is not whole" in capsys.readouterr().err
    torch.save(Served().state_dict(), "weights.pt")
    torch.save(Served(), "module.pt")
    for arguments, message in (
        (["weights.pt", "--model", MODEL], "weights.pt is no checkpoint of Lightning's, but a file with layer.weight"),
        ([checkpoint, "--model", MODEL, "--example", "module.pt"], f"more than tensors and plain values ({PROGRAM}.Se"),
        ([checkpoint, "--model", f"{PROGRAM}:Large"], "trained as another class"),
        ([checkpoint, "--model", f"{PROGRAM}:WIDTH"], "is no class of LightningModule, but 6"),
    ):
        assert main(["export", *arguments]) == 2
        assert message in capsys.readouterr().err


def test_the_users_own_code_is_named_with_its_line(checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine_raises.py").write_text("def data():\n    raise RuntimeError('server is down')\n")
    Path("mine_exits.py").write_text("import sys\nsys.exit('trained')\n")
    for option, name, message in (
        ("--data", "mine_raises:data", "RuntimeError: server is down at "),
        ("--data", f"{PROGRAM}:WIDTH", "'int' object is not callable"),
        ("--data", f"{PROGRAM}:metrics", "is not iterable"),
        ("--data", "builtins:list", "gave no batches"),
        ("--model", "mine_exits:Digits", "if __name__ == '__main__':"),
        ("--model", "mine", "write package.module:Name"),
        ("--model", "../mine:Digits", "write package.module:Name"),
        ("--model", "nowhere:Digits", f"the working folder, {Path.cwd()}"),
    ):
        assert main(["export", checkpoint, "--model", MODEL, option, name]) == 2
        said = capsys.readouterr().err
        assert f"{option} {name}" in said
        assert message in said


@pytest.fixture
def _sigint_is_heard() -> Iterator[None]:
    """Also in a process that a shell has started in the background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_sigint_is_heard")
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_it_with_a_line_and_leaves_nothing_behind(
    number: signal.Signals, status: int, checkpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """While the model is captured, for which a folder beside the file is there."""
    torch.save(torch.randn(3, 6), "example.pt")
    module = f"mine_stops_{number.name.lower()}"
    Path(f"{module}.py").write_text(
        f"import os, time\nfrom {PROGRAM} import Served\n\nclass Stops(Served):\n    def forward(self, x):\n"
        f"        os.kill(os.getpid(), {int(number)})\n        time.sleep(1)\n"
    )
    before = set(Path().iterdir()), signal.getsignal(signal.SIGTERM)
    assert main(["export", checkpoint, "--model", f"{module}:Stops", "--example", "example.pt"]) == status
    assert capsys.readouterr().err == "lightning-accel export: stopped; nothing was left behind.\n"
    left = {path for path in Path().iterdir() if path.name != "__pycache__"}
    assert (left, signal.getsignal(signal.SIGTERM)) == before
