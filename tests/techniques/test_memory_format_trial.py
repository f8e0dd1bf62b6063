"""The trial of channels_last in the first step changes nothing but the layout, however that step ends."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_accel.techniques.layout_draws import LayoutDraws
from lightning_accel.techniques.layout_trial import LayoutTrial
from support.models import TASKS, images
from support.techniques.memory_format_cases import IN_FORCE_NOWHERE, assert_same_step, clock, laid_out, step
from support.trial_cases import allowing

pytestmark = [pytest.mark.numbers, IN_FORCE_NOWHERE]


def test_a_first_step_that_raises_is_tried_again_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    clock(monkeypatch, 0.5)
    model = nn.Sequential(nn.Conv2d(3, 4, 3))
    handle = laid_out(model, "auto")

    def crash(x: Tensor) -> Tensor:
        model(x)
        raise KeyError("user's bug")

    with pytest.raises(KeyError):
        step(model, handle, images(0)[0], crash)
    assert not any("forward" in vars(m) for m in model.modules())
    step(model, handle, images(0)[0])
    assert "at 0.50x the speed here" in handle.report.refused("memory_format")["0"]
    handle.undo()


def test_batch_norm_statistics_move_by_one_step_in_a_step_with_a_trial() -> None:
    plain = TASKS["cnn"].model()
    model = copy.deepcopy(plain)
    handle = laid_out(model, "auto")
    assert_same_step(model, handle, plain, images(0)[0])
    assert int(model.blocks[0].bn1.num_batches_tracked) == 1
    handle.undo()


def test_dropout_draws_what_it_would_have_drawn() -> None:
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Dropout(0.5))
    model = copy.deepcopy(plain)
    handle = laid_out(model)
    losses = []
    for net, used in ((plain, None), (model, handle)):
        torch.manual_seed(3)
        losses.append(step(net, used, images(0)[0]))
    torch.testing.assert_close(losses[1], losses[0])
    handle.undo()


def test_a_batch_of_one_in_bfloat16_on_a_cpu_is_left_alone() -> None:
    """oneDNN: the kernels for it crash the interpreter as it ends, hence a process of its own."""
    program = (
        "import torch; from torch import nn; from lightning_accel import Plan, accelerate\n"
        "model = nn.Sequential(nn.Conv2d(16, 8, 1, stride=2, bias=False))\n"
        "handle = accelerate(model, Plan(precision='bf16-mixed'))\n"
        "with handle.step():\n    loss = model(handle.batch(torch.randn(1, 16, 16, 16))).float().sum()\n"
        "loss.backward()\nprint(handle.report.refused('memory_format'))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "batches of one sample" in done.stdout


@pytest.mark.parametrize("allowed", ["none", "bf16"])
def test_what_the_run_allows_convolutions_to_be_rounded_to_is_allowed_in_the_other_layout(allowed: str) -> None:
    """A GPU rounds both layouts, by torch's own default; nothing else here does, so that one stands for it."""

    def conv2d(x: Tensor, weight: Tensor) -> Tensor:
        if x.is_contiguous():
            return F.conv2d(x, weight)
        return F.conv2d(x.bfloat16(), weight.bfloat16()).float()

    trial = LayoutTrial((4,), LayoutDraws(torch.device("cpu"), foresees=True), by_clock=False, purse=None)
    with torch.no_grad(), allowing("conv", allowed):
        trial.__torch_function__(conv2d, (), (images(0)[0], torch.randn(16, 3, 3, 3)))
    assert trial.verdict().keep == (allowed == "bf16"), trial.verdict().reason
