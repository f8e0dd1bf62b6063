"""The trial of channels_last in the first step changes nothing but the layout, however that step ends."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

from support.models import TASKS, images
from support.techniques.memory_format_cases import IN_FORCE_NOWHERE, assert_same_step, clock, laid_out, step

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
