"""Fused steps on a GPU, where torch takes foreach by itself and kernels read the counts of steps on the device."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, RMSprop
from torch.profiler import ProfilerActivity, profile

from lightning_accel.core.stepping import has_fused
from lightning_accel.techniques.arms import OFF
from lightning_accel.techniques.optimizer_steps import StepsTogether, step_together
from support.optimizer_loops import Loop, assert_same_training, network

pytestmark = [pytest.mark.gpu, pytest.mark.numbers]

momentum = partial(SGD, lr=0.1, momentum=0.9)


def on_gpu(make: Any, setting: str, dtype: torch.dtype = torch.float32) -> Loop:
    return Loop(network(dtype).cuda(), make, setting)


def kernels(loop: Loop, index: int) -> int:
    """How many kernels a step launches."""
    loop.gradients(index)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        loop.optimizer.step()
        torch.cuda.synchronize()
    on_device = [event for event in seen.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return sum(not event.name.startswith(("Memcpy", "Memset", "Optimizer")) for event in on_device)


@pytest.mark.parametrize("make", [momentum, partial(Adam, eps=1e-3), partial(AdamW, eps=1e-3), Adagrad])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_trains_as_torchs_own_steps_through_every_switch(make: Any, dtype: torch.dtype) -> None:
    if make is Adagrad and not has_fused(Adagrad, "cuda", dtype):
        pytest.skip("this torch has no fused Adagrad on CUDA")
    plain, loop = on_gpu(make, "off", dtype), on_gpu(make, "fused", dtype)
    tolerance = 256 * torch.finfo(dtype).eps
    for start, choice in ((0, "fused"), (2, OFF), (4, "fused"), (6, OFF)):
        loop.patch().switch(choice)
        for each in (plain, loop):
            each.run(range(start, start + 2))
        assert_same_training(loop, plain, tolerance)
    loop.handle.undo()
    assert_same_training(loop, plain, tolerance)


@pytest.mark.needs_kernels("kernels in torch's profiler")
def test_a_fused_step_launches_fewer_kernels_than_torchs_own() -> None:
    plain, loop = on_gpu(AdamW, "off"), on_gpu(AdamW, "fused")
    for each in (plain, loop):
        each.run(range(2))
    assert kernels(loop, 2) <= 2 < kernels(plain, 2)


def test_counts_of_steps_are_on_the_device_and_in_a_checkpoint_on_the_host() -> None:
    loop = on_gpu(AdamW, "fused")
    loop.run(range(2))
    assert all(state["step"].is_cuda for state in loop.optimizer.state.values())
    saved = loop.optimizer.state_dict()
    assert all(state["step"].is_cpu and state["step"] == 2 for state in saved["state"].values())
    assert all(state["step"].is_cuda for state in loop.optimizer.state.values())  # that in use is left alone
    loop.patch().switch(OFF)
    assert all(state["step"].is_cpu for state in loop.optimizer.state.values())


def test_copies_have_their_counts_of_steps_on_the_host_and_the_run_goes_on_fused() -> None:
    loop = on_gpu(AdamW, "fused")
    loop.run(range(2))
    twin = copy.deepcopy(loop.optimizer)
    assert all(state["step"].is_cpu and state["step"] == 2 for state in twin.state.values())
    loop.run(range(2, 3))
    assert all(state["step"].is_cuda and state["step"] == 3 for state in loop.optimizer.state.values())


def test_runs_go_on_from_each_others_checkpoints() -> None:
    plain = on_gpu(AdamW, "off")
    plain.run(range(6))
    for ways in (("off", "fused"), ("fused", "off")):
        first, second = (on_gpu(AdamW, way) for way in ways)
        first.run(range(3))
        saved = copy.deepcopy((first.model.state_dict(), first.optimizer.state_dict()))
        second.model.load_state_dict(saved[0])
        second.optimizer.load_state_dict(saved[1])
        second.run(range(3, 6))
        assert_same_training(second, plain, 1e-5)


def test_layouts_that_differ_are_not_fused_and_do_not_raise() -> None:
    """Torch's kernels check them on a GPU, and raise."""
    plain, loop = on_gpu(AdamW, "off"), on_gpu(AdamW, "fused")
    for each in (plain, loop):
        each.run(range(2))
        each.gradients(2)
    weight: Any = loop.model[0].weight
    weight.grad = weight.grad.mT.contiguous().mT
    for each in (plain, loop):
        each.optimizer.step()
    assert_same_training(loop, plain, 1e-5)


def test_what_foreach_does_already_is_not_tried() -> None:
    loop = on_gpu(AdamW, "auto")
    (arm,) = loop.handle.engine.arms()
    assert arm.choices == ("fused",)
    assert arm.settle == 1  # the counts of steps are moved
    parameter = nn.Parameter(torch.ones(2, device="cuda"))
    (refusal,) = step_together("it", RMSprop([parameter]))
    assert not isinstance(refusal, StepsTogether)
    assert refusal.why_not.endswith("torch takes foreach there by itself")


def test_bfloat16_is_fused_within_its_rounding_and_float16_is_not() -> None:
    plain, loop = on_gpu(AdamW, "off", torch.bfloat16), on_gpu(AdamW, "fused", torch.bfloat16)
    for each in (plain, loop):
        each.run(range(4))
    eps = torch.finfo(torch.bfloat16).eps
    torch.testing.assert_close(loop.weights(), plain.weights(), rtol=4 * eps, atol=4 * eps)
    assert not has_fused(AdamW, "cuda", torch.float16)


def test_a_gradient_scaler_works_with_a_fused_step() -> None:
    plain, loop = on_gpu(AdamW, "off"), on_gpu(AdamW, "fused")
    for each in (plain, loop):
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
        for index in range(4):
            inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(index)).cuda()
            each.optimizer.zero_grad()
            with each.handle.step():
                loss = each.model(inputs).square().mean()
            scaler.scale(loss * (float("inf") if index == 2 else 1.0)).backward()
            scaler.unscale_(each.optimizer)
            nn.utils.clip_grad_norm_(each.model.parameters(), 0.5)
            scaler.step(each.optimizer)
            scaler.update()
        assert scaler.get_scale() == 2.0**9
    assert_same_training(loop, plain, 1e-5)


def test_one_of_two_devices_is_stepped_where_it_is() -> None:
    """A group over the host and a GPU, which torch steps device by device."""
    here, there = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(5, device="cuda"))
    module = nn.ParameterList([here, there])
    optimizer = AdamW(module.parameters())
    (patch,) = step_together("it", optimizer, "fused")
    assert isinstance(patch, StepsTogether)
    patch.apply()
    for _ in range(2):
        here.grad, there.grad = torch.ones(5), torch.ones(5, device="cuda")
        optimizer.step()
    assert optimizer.state[here]["step"].is_cpu
    assert optimizer.state[there]["step"].is_cuda
    torch.testing.assert_close(here, there.cpu())
    patch.undo()
