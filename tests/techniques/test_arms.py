"""The arms of the techniques: off, a step is the user's own; on, what the technique made of it; back and forth."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_accel import Plan, accelerate
from lightning_accel.assembly import AcceleratedModel
from lightning_accel.techniques.arms import OFF

pytestmark = pytest.mark.numbers


class Attention(nn.Module):
    """Attention by hand, over images, with an activation: something for each technique."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.act = nn.Conv2d(3, 16, 3, padding=1), nn.ReLU()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 4)

    def forward(self, images: Tensor) -> Tensor:
        x = self.act(self.conv(images))
        q, k, v = self.qkv(x.flatten(2).mT).chunk(3, dim=-1)
        return self.out((q @ k.mT / 4.0).softmax(-1) @ v)


IMAGES = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def started(**plan: Any) -> tuple[AcceleratedModel, nn.Module]:
    torch.manual_seed(0)
    model = Attention()
    settings = {"precision": "32-true", "memory_format": "off", "inplace_activations": "off", "flash_attention": "off"}
    settings["trust"] = "checked"  # the test does the switching
    handle = accelerate(model, Plan().replace(**{**settings, **plan}))
    for _ in range(3):
        step(handle, model)
    return handle, model


def step(handle: AcceleratedModel, model: nn.Module) -> tuple[Tensor, list[Tensor | None]]:
    model.zero_grad()
    with handle.step():
        outputs = model(handle.batch(IMAGES))
    outputs.square().mean().backward()
    return outputs.detach(), [parameter.grad for parameter in model.parameters()]


def operators(outputs: Tensor) -> set[str]:
    """The names of the operators in the graph behind a tensor."""
    found, left = set(), [outputs.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in found:
            found.add(node)
            left += [following for following, _ in node.next_functions]
    return {node.name() for node in found}


PLANS = [{"flash_attention": {"backend": "auto", "force": ["Attention"]}}, {"inplace_activations": "auto"}]


@pytest.mark.parametrize("plan", PLANS, ids=["flash_attention", "inplace_activations"])
def test_an_arm_goes_off_and_on_and_the_numbers_stay(plan: dict[str, Any]) -> None:
    handle, model = started(**plan)
    plain = Attention()
    plain.load_state_dict(model.state_dict())
    expected = plain(IMAGES)
    (arm,) = handle.engine.arms()
    on = step(handle, model)
    for choice in (OFF, *arm.choices, OFF, *arm.choices):
        arm.choose(choice)
        outputs, gradients = step(handle, model)
        torch.testing.assert_close(outputs, expected)
        torch.testing.assert_close(gradients, on[1])
    handle.undo()


def test_attention_that_is_off_is_the_users_own() -> None:
    handle, model = started(flash_attention={"backend": "auto", "force": ["Attention"]})
    (arm,) = handle.engine.arms()
    for choice, is_fused in ((OFF, False), ("on", True), (OFF, False)):
        arm.choose(choice)
        with handle.step():
            outputs = model(handle.batch(IMAGES))
        assert any("ScaledDotProduct" in name for name in operators(outputs)) is is_fused
    handle.undo()


def test_layouts_go_there_and_back_with_the_optimizers_state(determinism_restored: None) -> None:
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)  # in which no clock says that this machine is slower in the layout
    model = Attention()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    handle = accelerate(
        model, Plan(precision="32-true", techniques={"flash_attention": "off"}, trust="checked"), optimizers=optimizer
    )
    for _ in range(3):
        step(handle, model)
        optimizer.step()
    weight = model.conv.weight
    arms = {arm.name: arm for arm in handle.engine.arms()}
    for choice, last in ((OFF, False), ("on", True), (OFF, False)):
        arms["memory_format"].choose(choice)
        step(handle, model)
        optimizer.step()
        assert weight.is_contiguous(memory_format=torch.channels_last) is last
        assert optimizer.state[weight]["exp_avg"].stride() == weight.stride()
    handle.undo()


def test_what_was_asked_for_by_name_is_not_on_trial() -> None:
    handle, _ = started(flash_attention="sdpa")
    assert handle.engine.arms() == []
    handle.undo()
    handle, _ = started(memory_format="channels_last")
    assert handle.engine.arms() == []
    handle.undo()
