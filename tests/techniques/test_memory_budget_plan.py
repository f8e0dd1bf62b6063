"""The plan for a budget can be read and drawn, and made, applied and taken back without an engine."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_accel import OffloadingOptions, Plan, plan_memory
from lightning_accel.core.optimizers import state_of
from lightning_accel.memory.meter import meter_for
from lightning_accel.techniques.activation_offloading import OffloadingSetting
from support.models import TinyTransformer
from support.techniques.memory_budget_cases import (
    SETTLED,
    Block,
    Loop,
    Stack,
    budget,
    handles_are_undone,
    peak_of,
    plain,
)

pytestmark = pytest.mark.numbers

__all__ = ["handles_are_undone", "plain"]


# -- what the report says --------------------------------------------------------------------------------------------


def test_the_report_has_a_table_by_block(plain: tuple[int, int]) -> None:
    loop = Loop(Stack(), budget(plain, 0.6))
    loop.run(SETTLED)
    text = loop.handle.report.to_text()
    assert "fixed: parameters" in text
    assert "peak of a step: budget" in text
    assert all(f"blocks.{index}" in text for index in (0, 5))
    assert "gelu" in text  # what made the saved bytes
    record = loop.handle.report.of("memory_budget")
    assert set(record.changes) == {site for site, way in loop.plan.policies.items() if way != "keep"}
    assert set(record.refusals) == {site for site, way in loop.plan.policies.items() if way == "keep"}


def test_fixed_memory_is_counted_by_what_it_is() -> None:
    loop = Loop(Stack(), "1GiB")
    loop.run(SETTLED)
    size = sum(p.numel() * p.element_size() for p in loop.model.parameters())
    fixed = loop.plan.fixed
    assert (fixed.parameters, fixed.gradients, fixed.buffers) == (size, size, 0)
    assert fixed.optimizer >= 2 * size


def test_the_plan_is_drawn_as_stacked_bars(plain: tuple[int, int]) -> None:
    loop = Loop(Stack(), budget(plain, 0.6))
    loop.run(SETTLED)
    loop.plan.plot("plan.svg")
    with open("plan.svg", encoding="utf-8") as drawn:
        assert drawn.read().count("<path") > 10


# -- without an engine -----------------------------------------------------------------------------------------------


@pytest.fixture
def trained() -> tuple[nn.Module, Optimizer, Callable[[nn.Module, Tensor], None]]:
    torch.manual_seed(1)
    model = Stack()
    optimizer = torch.optim.AdamW(model.parameters())

    def step(model: nn.Module, batch: Tensor) -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


def test_plan_memory_plans_and_leaves_no_trace(plain: tuple[int, int], trained: Any) -> None:
    model, optimizer, step = trained
    step(model, torch.randn(4, 32))
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    batch, random_state = torch.randn(256, 32), torch.get_rng_state()
    plan = plan_memory(model, batch, budget(plain, 0.6), step)
    torch.testing.assert_close((model.state_dict(), optimizer.state_dict()), before, rtol=0, atol=0)
    assert plan.measured_peak_bytes is not None
    assert plan.measured_peak_bytes <= budget(plain, 0.6)
    assert not any("forward" in vars(module) for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), random_state)


def test_a_plan_is_applied_and_taken_back(plain: tuple[int, int], trained: Any) -> None:
    model, optimizer, step = trained
    batch = torch.randn(256, 32)
    plan = plan_memory(model, batch, budget(plain, 0.6), step)
    patches = plan.apply(model)
    meter = meter_for(torch.device("cpu"))
    step(model, batch)
    meter.start([*model.parameters(), *state_of([optimizer])])
    step(model, batch)
    assert max(interval.peak_bytes for interval in meter.stop()) <= budget(plain, 0.6)
    patches.undo()
    assert not any("forward" in vars(module) for module in model.modules())


def test_an_applied_plan_that_offloads_the_rest_does_so() -> None:
    class Wide(nn.Module):
        """Most of what it saves is saved outside its blocks."""

        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(2))
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(12):
                x = (x * self.scale).sigmoid()
            for block in self.blocks:
                x = block(x)
            return x

    torch.manual_seed(1)
    model, batch = Wide(), torch.randn(1024, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(model: nn.Module, batch: Tensor) -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    plain = peak_of(lambda: step(model, batch), model, optimizer)
    plan = plan_memory(model, batch, plain // 2, step, offloading=OffloadingOptions(to="disk", min_bytes=1024))
    assert plan.offloads_rest
    patches = plan.apply(model)
    step(model, batch)
    assert peak_of(lambda: step(model, batch), model, optimizer) <= 1.02 * (plain // 2)
    patches.undo()


def test_plan_memory_says_when_the_step_calls_no_block() -> None:
    model = TinyTransformer()
    with pytest.raises(RuntimeError, match="nothing was planned"):
        plan_memory(model, None, "1GiB", lambda model, batch: None)


@pytest.mark.parametrize(
    ("setting", "device", "offloads"),
    [
        ("auto", "cuda", True),
        ("auto", "cpu", False),
        ("off", "cuda", False),
        ("off", "cpu", False),
        ("host", "cuda", True),
        ("disk", "cpu", True),
    ],
)
def test_blocks_offload_unless_it_is_forbidden_or_would_free_nothing(
    setting: OffloadingSetting, device: str, offloads: bool
) -> None:
    """Nothing is on the device yet: what the planner may choose from is known before."""
    plan = Plan(memory={"offload": setting, "budget": "1GiB"})
    assert (plan.of("activation_offloading").on(device) is not None) == offloads
