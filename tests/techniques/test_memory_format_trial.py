"""The trial of channels_last in the first step changes nothing but the layout, however that step ends."""

from __future__ import annotations

import copy
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from lightning_accel.core.purse import Purse
from lightning_accel.techniques.layout_modes import LayoutDraws
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


@pytest.mark.medium
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

    draws = LayoutDraws(torch.device("cpu"), foresees=True)
    trial = LayoutTrial((4,), draws, by_clock=False, is_judged_live=False, purse=None)
    with torch.no_grad(), allowing("conv", allowed):
        trial.__torch_function__(conv2d, (), (images(0)[0], torch.randn(16, 3, 3, 3)))
    assert trial.verdict().keep == (allowed == "bf16"), trial.verdict().reason


class PaysWithinTheStep(Purse):
    """Has seconds for what comes within the step, and none for what comes after it."""

    is_within = True

    @override
    def can_pay(self, seconds: float) -> bool:
        return self.is_within


@pytest.mark.parametrize("is_judged_live", [True, False])
def test_a_layout_that_the_run_cannot_pay_to_time_is_left_to_live_trials_if_there_are_any(is_judged_live: bool) -> None:
    model, purse = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), PaysWithinTheStep()
    draws = LayoutDraws(torch.device("cpu"), foresees=True)
    with LayoutTrial((4,), draws, by_clock=True, is_judged_live=is_judged_live, purse=purse) as trial:
        model(images(0)[0]).sum().backward()
        purse.is_within = False
    verdict = trial.verdict()
    assert (verdict.keep, verdict.kind) == ((True, "kept") if is_judged_live else (False, "too_dear"))
    assert ("whole steps decide" in verdict.reason) == is_judged_live


@pytest.mark.parametrize(
    ("is_judged_live", "speed", "is_kept"), [(True, 0.95, True), (True, 0.8, False), (False, 0.95, False)]
)
def test_a_layout_that_seems_a_little_slower_is_left_to_live_trials_if_there_are_any(
    is_judged_live: bool, speed: float, is_kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock(monkeypatch, speed)
    model, draws = nn.Conv2d(3, 4, 3), LayoutDraws(torch.device("cpu"), foresees=True)
    with LayoutTrial((4,), draws, by_clock=True, is_judged_live=is_judged_live, purse=None) as trial:
        model(images(0)[0])
    assert trial.verdict().keep is is_kept
    assert f"{speed:.2f}x the speed here" in trial.verdict().reason


def test_times_are_taken_in_the_precision_of_the_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step has left its autocast by then."""
    dtypes: set[torch.dtype] = set()
    sound = torch.conv2d

    def conv2d(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return torch.overrides.handle_torch_function(noted, (x,), x, *args, **kwargs)

    def noted(*args: Any, **kwargs: Any) -> Tensor:
        y = sound(*args, **kwargs)
        dtypes.add(y.dtype)
        return y

    noted.__name__ = "conv2d"
    monkeypatch.setattr(F, "conv2d", conv2d)
    model, draws = nn.Conv2d(3, 16, 3), LayoutDraws(torch.device("cpu"), foresees=True)
    trial = LayoutTrial((4,), draws, by_clock=True, is_judged_live=False, purse=None)
    with trial, torch.autocast("cpu", torch.bfloat16):
        model(images(0)[0])
    assert trial.verdict().measured.original_ms
    assert dtypes == {torch.bfloat16}


def test_a_trial_is_expected_to_take_as_long_as_convolutions_are_of_many_kinds() -> None:
    def expected_s(*kernels: int) -> float:
        handle = laid_out(nn.Sequential(*(nn.Conv2d(3, 3, kernel) for kernel in kernels)), "auto")
        costs_s = handle.engine.costs_s(step_s=1.0)
        handle.undo()
        return costs_s["memory_format"]

    assert expected_s(3, 3, 3, 3) == expected_s(1, 3, 5, 7) / 4
