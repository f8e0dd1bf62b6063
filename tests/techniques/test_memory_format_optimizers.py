"""Optimizers that look at the layout of weights and gradients, beside those that work element by element."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Optimizer

from lightning_accel import Plan, accelerate

pytestmark = pytest.mark.numbers


class FlatteningOptimizer(Optimizer):
    """Flattens every gradient with ``.view()``, as published versions of Muon do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                flat = parameter.grad.view(len(parameter.grad), -1)
                parameter.add_(flat.view(parameter.shape), alpha=-group["lr"])


def train(plan: Plan, make_optimizer: Callable[[Any], Optimizer]) -> tuple[list[float], dict[str, str]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(8 * 16, 2))
    handle = accelerate(model, plan)
    optimizer = make_optimizer(model.parameters())
    losses = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        with handle.step():
            loss = model(handle.batch(images)).square().mean()
        loss.backward()
        losses.append(float(loss.detach()))
        return loss

    for _ in range(3):
        images = torch.randn(4, 3, 8, 8)
        if isinstance(optimizer, LBFGS):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
    handle.undo()
    return losses, handle.report.refused("memory_format")


@pytest.mark.parametrize("make_optimizer", [FlatteningOptimizer, LBFGS], ids=["flattening", "LBFGS"])
def test_layouts_are_given_back_before_an_optimizer_that_may_read_them_steps(
    make_optimizer: Callable[[Any], Optimizer],
) -> None:
    plain, _ = train(Plan(precision="32-true", techniques={"memory_format": "off"}), make_optimizer)
    # verify=False leaves the timing out, so that nothing but the optimizer decides.
    losses, refused = train(
        Plan(precision="32-true", techniques={"inplace_activations": False}, trust="unchecked"), make_optimizer
    )
    assert losses == pytest.approx(plain, rel=1e-5)
    assert set(refused) == {"0", "2"}
    assert make_optimizer.__name__ in refused["0"]


def test_an_explicit_format_trusts_an_optimizer_that_is_not_torchs() -> None:
    class Sub(SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    plan = Plan(precision="32-true", techniques={"memory_format": "channels_last"})
    _, refused = train(plan, lambda parameters: Sub(parameters, lr=0.01))
    assert refused == {}
