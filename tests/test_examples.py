"""The examples run as they stand, plain and accelerated."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("sklearn")
pytest.importorskip("tensorboard")

import torch

pytestmark = pytest.mark.numbers

EXAMPLES = Path(__file__).parents[1] / "examples"
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


@pytest.fixture(autouse=True)
def _examples_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)


@pytest.fixture(params=["digits", "bytes_gpt"])
def example(request: pytest.FixtureRequest) -> ModuleType:
    return __import__(request.param)


def shrunk(monkeypatch: pytest.MonkeyPatch, example: ModuleType) -> None:
    """The example's own classes, at a size for a test."""
    if example.__name__ == "digits":
        net, data = example.DigitsNet, example.Digits
        monkeypatch.setattr(example, "DigitsNet", lambda: net(width=4))
        monkeypatch.setattr(example, "Digits", lambda batch_size, size: data(batch_size=batch_size, size=16))
    else:
        net, data = example.BytesGPT, example.StdlibText
        monkeypatch.setattr(example, "BytesGPT", lambda **_: net(dim=16, depth=2, num_heads=2, seq_len=32))
        monkeypatch.setattr(
            example, "StdlibText", lambda batch_size, seq_len=32: data(batch_size=batch_size, seq_len=32)
        )


@pytest.mark.parametrize("mode", [[], ["--plain"]])
def test_an_example_runs_from_the_command_line(
    example: ModuleType, mode: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shrunk(monkeypatch, example)
    monkeypatch.setattr(sys, "argv", ["example.py", *mode, "--max-steps=2", "--batch-size=4", "--accelerator=cpu"])
    example.main()
    assert "train/loss" in capsys.readouterr().out


def test_both_sides_start_alike_and_see_the_same_batches(example: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the demo would compare two different runs. In float32, so that equal means equal."""
    from lightning.pytorch import Callback

    from lightning_accel import AccelPlugin

    class Watch(Callback):
        def __init__(self) -> None:
            self.weights: dict[str, torch.Tensor] = {}
            self.batches: list[torch.Tensor] = []

        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            self.weights = {name: value.clone() for name, value in pl_module.state_dict().items()}

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            self.batches.append(batch[0].clone())

    shrunk(monkeypatch, example)
    monkeypatch.setattr(example, "AccelPlugin", lambda: AccelPlugin(precision="32-true", report=False))
    plain, fast = Watch(), Watch()
    losses = []
    for watch in (plain, fast):
        options = {**QUIET, "callbacks": [watch], "limit_train_batches": 3, "limit_val_batches": 2}
        trainer = example.train(plain=watch is plain, epochs=1, batch_size=4, **options)
        losses.append(trainer.callback_metrics["val/loss"].item())
    assert plain.weights.keys() == fast.weights.keys()
    assert all(torch.equal(plain.weights[name], fast.weights[name]) for name in plain.weights)
    assert len(plain.batches) == len(fast.batches) == 3
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(plain.batches, fast.batches, strict=True))
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.medium
@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_the_sharded_example_resumes_where_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In one process; the strategies' own tests have more."""
    import bytes_gpt
    import fsdp

    shrunk(monkeypatch, bytes_gpt)
    monkeypatch.setattr(fsdp, "BytesGPT", bytes_gpt.BytesGPT)
    monkeypatch.setattr(fsdp, "StdlibText", bytes_gpt.StdlibText)
    quiet = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_progress_bar": False}
    quiet |= {"enable_model_summary": False, "folder": tmp_path, "batch_size": 4}
    fsdp.train(strategy="accel", max_epochs=1, **quiet)
    assert fsdp.train(strategy="accel", max_epochs=2, resume=True, **quiet).global_step == 100


@pytest.mark.slow
def test_two_processes_of_the_sharded_example_hold_half_each(tmp_path: Path) -> None:
    command = [sys.executable, EXAMPLES / "fsdp.py", "--accelerator=cpu", "--devices=2", "--epochs=1", "--batch-size=1"]
    run = subprocess.run([*command, "--folder", tmp_path], capture_output=True, text=True, timeout=200, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    for rank in (0, 1):
        assert f"rank {rank} holds 25.6 MiB of 51.2 MiB: 50%" in run.stdout


def test_the_gpt_has_a_few_million_parameters_and_megabytes_to_read() -> None:
    import bytes_gpt

    assert 2e6 < sum(parameter.numel() for parameter in bytes_gpt.BytesGPT().parameters()) < 5e6
    data = bytes_gpt.StdlibText()
    data.setup("fit")
    assert len(data.train_set.text) + len(data.val_set.text) > 2e6
    tokens, targets = data.train_set[3]
    assert torch.equal(tokens[1:], targets[:-1])
    assert torch.equal(data.train_set[4][0][:1], targets[-1:])


def test_the_digits_are_split_once() -> None:
    import digits

    data = digits.Digits()
    data.setup("fit")
    assert len(data.train_set) + len(data.val_set) == 1797
    assert not set(data.train_set.indices) & set(data.val_set.indices)
    image, _ = data.train_set[0]
    assert image.shape == (1, 64, 64)
    assert image.min() >= 0
    assert image.max() <= 1


@pytest.mark.medium
def test_the_configuration_trains_and_its_scalars_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jsonargparse")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    small = ["model.width=4", "data.size=16", "data.batch_size=16", "trainer.max_epochs=2", "trainer.accelerator=cpu"]
    small += ["trainer.limit_train_batches=4", "trainer.limit_val_batches=1", "trainer.enable_progress_bar=false"]
    arguments = ["fit", "--config", str(EXAMPLES / "config.yaml"), *(f"--{option}" for option in small)]
    monkeypatch.setattr(sys, "argv", ["digits_cli.py", *arguments])
    import digits_cli

    digits_cli.main()
    events = EventAccumulator("lightning_logs/digits/version_0")
    events.Reload()
    for name in ("samples_per_sec", "steps_per_sec", "step_ms_p50", "step_ms_p95"):
        values = [scalar.value for scalar in events.Scalars(f"accel/{name}")]
        assert len(values) in (1, 2), name  # two epochs within a second are told together
        assert all(value >= 0 for value in values)
    assert len(events.Scalars("val/accuracy")) == 2


@pytest.mark.medium
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.parametrize("mode", [[], ["--plain"]])
def test_a_covariance_says_more_of_new_patients_than_variances_do(
    mode: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import gaussian_head

    monkeypatch.setattr(sys, "argv", ["gaussian_head.py", *mode, "--epochs=10", "--accelerator=cpu"])
    gaussian_head.main()
    found = capsys.readouterr().out
    full, independent = (float(number) for number in re.findall(r"log-likelihood (\S+) nats", found))
    assert full < independent - 1
    differences = [float(number) for number in re.findall(r"SciPy's log-densities: (\S+)", found)]
    assert len(differences) == 2
    assert max(differences) < 1e-4


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.slow
def test_augmentation_gives_the_same_accuracy_on_the_device_and_off_it() -> None:
    import augment

    found = [augment.accuracy(how, seed=0, epochs=3, accelerator="cpu") for how in ("on the device", "on the host")]
    assert found[0] == found[1]


@pytest.mark.slow
def test_augmentation_helps_with_every_seed() -> None:
    import augment

    for seed in range(3):
        plain, augmented = (augment.accuracy(how, seed, epochs=100) for how in ("plain", "on the device"))
        assert augmented > plain
