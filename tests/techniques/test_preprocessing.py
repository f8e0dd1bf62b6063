"""``Plan(preprocess=[...])`` in a plain loop."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_accel import Plan, accelerate
from lightning_accel.core.host import Host
from lightning_accel.core.report import AccelError, AccelWarning
from lightning_accel.data import GaussianNoise, Map, Normalize, tensor_arrays
from lightning_accel.techniques import preprocessing

pytestmark = pytest.mark.numbers

NOISY = [Normalize(0.5, 0.25), GaussianNoise(0.1)]


def images() -> Tensor:
    return torch.randint(0, 256, (4, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def handle(**settings: Any) -> Any:
    quiet = {"precision": "32-true", "memory_format": "off", "inplace_activations": False}
    return accelerate(nn.Conv2d(3, 4, 3), Plan().replace(**{**quiet, "preprocess": NOISY, **settings}))


def test_every_batch_of_training_has_random_numbers_of_its_own() -> None:
    loop = handle()
    assert not torch.equal(loop.batch(images()), loop.batch(images()))


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_a_batch_of_another_stage_gets_what_is_deterministic(stage: str) -> None:
    loop = handle()
    expected = (images().float() / 255 - 0.5) / 0.25
    torch.testing.assert_close(loop.batch(images(), stage), expected)
    with loop.step(stage):
        torch.testing.assert_close(loop.batch(images()), expected)


def test_a_model_in_evaluation_mode_gets_what_is_deterministic() -> None:
    loop = handle()
    loop.model.eval()
    assert torch.equal(loop.batch(images()), loop.batch(images()))


def test_every_rank_has_random_numbers_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch.distributed says of this process is simulated."""
    found = []
    for rank in range(2):
        monkeypatch.setattr(preprocessing, "has_ranks", lambda: True)
        monkeypatch.setattr(preprocessing, "dist", types.SimpleNamespace(get_rank=lambda rank=rank: rank))
        torch.manual_seed(0)
        found.append(handle().batch(images()))
    assert not torch.equal(*found)


def test_a_batch_comes_in_the_dtype_of_the_step() -> None:
    host = Host(kind="cpu", device_name="a CPU", native_bf16=True)
    plan = Plan(precision="bf16-mixed", preprocess=[Normalize(0.5, 0.25)], trust="unchecked")
    loop = accelerate(nn.Sequential(nn.Conv2d(3, 4, 3)), plan, host=host)
    batch = loop.batch(images())
    assert batch.dtype == torch.bfloat16
    loop.undo()


def test_it_comes_in_float32_where_the_precision_may_be_given_up() -> None:
    host = Host(kind="cpu", device_name="a CPU", native_bf16=True)
    loop = accelerate(nn.Sequential(nn.Conv2d(3, 4, 3)), Plan(preprocess=[Normalize(0.5, 0.25)]), host=host)
    assert loop.batch(images()).dtype == torch.float32
    loop.undo()


def test_the_report_says_what_is_done_to_batches() -> None:
    assert handle().report.of("preprocess").status == "Normalize, GaussianNoise with NumPy on cpu"


def test_nothing_is_done_to_batches_after_undo() -> None:
    loop = handle(preprocess=[Map(lambda xp, batch: batch + 1)])
    loop.undo()
    assert torch.equal(loop.batch(images()), images())


@pytest.fixture
def simulated_gpu_without_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's device is said to be a GPU, on which CuPy is not installed."""
    monkeypatch.setattr("lightning_accel.assembly.device_of", lambda model: torch.device("cuda", 0))
    monkeypatch.setattr(tensor_arrays, "_why_no_cupy", lambda index: "CuPy is not installed: pip install 'x[cuda13]'")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


@pytest.mark.usefixtures("simulated_gpu_without_cupy")
def test_without_cupy_it_is_said_who_does_it_and_what_would_mend_that() -> None:
    with pytest.warns(
        AccelWarning, match=r"preprocess: CuPy is not installed: pip install .*NumPy does it on the host"
    ):
        loop = handle()
    assert "NumPy on the host, before the transfer" in loop.report.of("preprocess").status


@pytest.mark.usefixtures("simulated_gpu_without_cupy")
def test_strict_without_cupy_is_an_error() -> None:
    with pytest.raises(AccelError, match="CuPy is not installed"):
        handle(strict=True)
