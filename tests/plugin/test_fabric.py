"""A loop of Lightning Fabric's, with one line."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_accel import AccelFabricPlugin, AccelPlugin
from lightning_accel.tuning.turns import LoopTuning
from support.lightning_models import cnn, footprint

pytestmark = pytest.mark.numbers

BATCHES = [torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(n)) for n in range(6)]


def trained(plugins: list[Any], *, net: nn.Module | None = None, accumulate: int = 1) -> tuple[nn.Module, list[Tensor]]:
    """The module after a loop as Fabric's users write it, and its losses."""
    torch.manual_seed(0)
    net = net or cnn()
    fabric = Fabric(accelerator="cpu", devices=1, plugins=plugins)
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=0.01))
    losses = []
    for number, batch in enumerate(BATCHES):
        outputs = model(batch)
        loss = F.cross_entropy(outputs, torch.arange(4) % outputs.shape[1])
        fabric.backward(loss)
        if (number + 1) % accumulate == 0:
            fabric.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
    return net, losses


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_loop_trains_to_the_same_numbers(accumulate: int) -> None:
    plugin = AccelFabricPlugin(
        precision="32-true",
        memory={"checkpoint": "full", "blocks": ["0", "3"]},
        techniques={"optimizer": "off", "memory_format": "off"},
        trust="checked",
    )
    plain, expected = trained([], accumulate=accumulate)
    fast, losses = trained([plugin], accumulate=accumulate)
    assert plugin.report.applied("gradient_checkpointing") == ["0", "3"]
    assert all(map(torch.equal, losses, expected))
    assert all(map(torch.equal, fast.parameters(), plain.parameters()))


def test_several_modules_are_one_and_a_step_has_one_of_each_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of one network alone, beside one of the other, would be another kind of step: no two could be compared."""
    begun = []
    monkeypatch.setattr(LoopTuning, "step_begins", lambda turns: begun.append(True))
    plugin = AccelFabricPlugin(precision="32-true", memory={"checkpoint": "full", "blocks": ["0.0", "1.0"]})
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[plugin])
    nets = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(2)]
    pairs = [fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.01)) for net in nets]
    for _ in range(5):
        for model, optimizer in pairs:
            optimizer.zero_grad()
            fabric.backward(model(torch.randn(4, 8)).square().mean())
            optimizer.step()
    assert plugin.report.applied("gradient_checkpointing") == ["0.0", "1.0"]
    assert len(begun) == 1 + 5  # the first ends as soon as it is known which optimizer ends it


def test_teardown_gives_the_module_back() -> None:
    plugin = AccelFabricPlugin(precision="bf16-mixed", techniques={"memory_format": "channels_last"}, trust="checked")
    net = cnn()
    before = footprint(net)
    trained([plugin], net=net)
    assert footprint(net) != before
    plugin.teardown()
    assert footprint(net) == before


def test_outputs_are_in_float32_whatever_computes_them() -> None:
    plugin = AccelFabricPlugin(precision="bf16-mixed", trust="checked")
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[plugin])
    model = fabric.setup(cnn())
    assert model(BATCHES[0]).dtype == torch.float32
    assert plugin.report.of("precision").is_on


def test_the_scaler_steps_with_float16() -> None:
    plugin = AccelFabricPlugin(precision="16-mixed", trust="checked")
    _, expected = trained([])
    _, losses = trained([plugin])
    torch.testing.assert_close(losses, expected, atol=0.1, rtol=0.0)


def test_the_plugin_of_trainers_says_what_fabric_takes() -> None:
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[AccelPlugin()])
    with pytest.raises(TypeError, match="AccelFabricPlugin"):
        fabric.setup(cnn())
