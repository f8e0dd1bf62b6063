"""FLOPs: what counts, and that counting leaves everything as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from lightning_accel.callbacks._step_watch import FlopMeter, peak_flops_per_sec
from lightning_accel.evidence import flops
from lightning_accel.evidence.flops import FlopMode

LINEAR_FLOPS = 2 * 8 * 16 * 16  # one matrix product of an (8, 16) input and a (16, 16) weight


def count(step: Callable[[], Any]) -> int:
    with FlopMode() as mode:
        step()
    assert mode.failure is None
    return mode.flops


@pytest.fixture
def linear() -> nn.Linear:
    return nn.Linear(16, 16)


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(8, 16, requires_grad=True)


def test_agrees_with_torchs_own_counter() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10))
    images = torch.randn(4, 3, 8, 8)
    with FlopCounterMode(display=False) as reference:
        model(images).sum().backward()
    assert count(lambda: model(images).sum().backward()) == reference.get_total_flops() > 0


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_recomputed_forward_does_not_count(linear: nn.Linear, x: torch.Tensor, use_reentrant: bool) -> None:
    assert count(lambda: linear(x).sum().backward()) == 3 * LINEAR_FLOPS
    assert count(lambda: checkpoint(linear, x, use_reentrant=use_reentrant).sum().backward()) == 3 * LINEAR_FLOPS


def test_selective_recomputation_does_not_count(linear: nn.Linear, x: torch.Tensor) -> None:
    def keep_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.addmm.default else CheckpointPolicy.PREFER_RECOMPUTE

    def step() -> None:
        checkpoint(
            nn.Sequential(linear, nn.GELU(), linear),
            x,
            use_reentrant=False,
            context_fn=lambda: create_selective_checkpoint_contexts(keep_products),
        ).sum().backward()

    assert count(step) == 6 * LINEAR_FLOPS


def test_attention_on_cpu_counts() -> None:
    q, k, v = (torch.randn(2, 4, 16, 8, requires_grad=True) for _ in range(3))
    forward = 2 * (2 * 2 * 4 * 16 * 16 * 8)  # two products
    assert count(lambda: F.scaled_dot_product_attention(q, k, v)) == forward
    assert count(lambda: F.scaled_dot_product_attention(q, k, v).sum().backward()) == forward + 5 * forward // 2


@pytest.mark.parametrize("region", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
def test_a_frozen_part_counts(linear: nn.Linear, region: Callable[[], Any]) -> None:
    def step() -> None:
        with region():
            linear(torch.randn(8, 16))

    assert count(step) == LINEAR_FLOPS


def test_jagged_tensors_count_what_they_hold(linear: nn.Linear) -> None:
    jagged = torch.nested.nested_tensor([torch.randn(3, 16), torch.randn(5, 16)], layout=torch.jagged)
    assert count(lambda: linear(jagged).values().sum().backward()) == 2 * LINEAR_FLOPS


def test_tensors_that_only_have_a_shape_do_not_count() -> None:
    """DTensor asks such for the shapes of what it is about to compute."""
    with FakeTensorMode():
        x = torch.empty(2, 3)
    with FlopMode() as mode:
        assert (x @ x.T).shape == (2, 2)
    assert mode.flops == 0


def test_a_failing_formula_does_not_fail_the_step(
    linear: nn.Linear, x: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any, **kwargs: Any) -> int:
        raise TypeError("an operator's signature has changed")

    monkeypatch.setitem(flops.flop_registry, torch.ops.aten.addmm, broken)
    meter = FlopMeter()
    meter.open(FlopMode())
    linear(x).sum().backward()
    meter.close(keep=True)
    assert meter.flops is None


def test_a_step_without_a_backward_pass_is_tried_again(linear: nn.Linear, x: torch.Tensor) -> None:
    meter = FlopMeter()
    meter.open(FlopMode())
    linear(x)
    meter.close(keep=True)
    assert (meter.flops, meter.is_due) == (None, True)
    meter.open(FlopMode())
    linear(x).sum().backward()
    meter.close(keep=True)
    assert (meter.flops, meter.is_due) == (3 * LINEAR_FLOPS, False)


def test_a_run_without_backward_passes_is_left_alone_after_a_few_tries(linear: nn.Linear, x: torch.Tensor) -> None:
    meter = FlopMeter()
    tries = 0
    while meter.is_due:
        meter.open(FlopMode())
        linear(x)
        meter.close(keep=True)
        tries += 1
    assert tries == 5


def test_closing_twice_is_closing_once() -> None:
    meter = FlopMeter()
    meter.open(FlopMode())
    meter.close()
    meter.close(keep=True)
    assert (meter.flops, meter.is_open, meter.is_due) == (None, False, True)


def test_compilation_survives_a_counted_step(linear: nn.Linear, x: torch.Tensor) -> None:
    """A bare dispatch mode would not let it: torch 2.13 then runs the module eagerly for ever after."""
    graph_calls: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            graph_calls.append(1)
            return graph.forward(*args)

        return call

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = linear

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.gelu(self.linear(x))

    model = Net()
    model.compile(backend=backend)
    model(x).sum().backward()
    meter = FlopMeter()
    meter.open(FlopMode())
    model(x).sum().backward()
    meter.close(keep=True)
    assert meter.flops == 3 * LINEAR_FLOPS
    assert len(graph_calls) == 1  # the counted step ran uncompiled
    model(x).sum().backward()
    assert len(graph_calls) == 2
    torch._dynamo.reset()


def test_the_peak_of_a_cpu_is_not_known() -> None:
    assert peak_flops_per_sec(torch.device("cpu"), "32-true") is None


@pytest.mark.parametrize(
    ("precision", "peak"), [("bf16-mixed", 989.4e12), ("32-true", 66.9e12), ("transformer-engine", None)]
)
def test_the_peak_of_an_h200_is_its_dense_rate(
    precision: str, peak: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    assert peak_flops_per_sec(torch.device("cuda", 0), precision) == peak


def test_the_peak_of_an_unknown_card_is_left_out_silently(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some Card 9000")
    assert peak_flops_per_sec(torch.device("cuda", 0), "16-mixed") is None
