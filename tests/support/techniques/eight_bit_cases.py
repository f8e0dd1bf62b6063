"""A small network, its training and what is asked of an optimizer, for the tests of moments in 8 bits."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_accel import Plan, accelerate
from lightning_accel.assembly import AcceleratedModel
from lightning_accel.core.host import Host
from lightning_accel.memory import eight_bits

NEAR = 0.05  # of a loss: it falls by a half in such a run, and were the moments lost it would jump

OTHERS_OFF = {"precision": "32-true", "flash_attention": "off", "memory_format": "off", "inplace_activations": "off"}


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Two weights that are large enough, two biases that are not."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64)).to(dtype)


def started(optimizer: Optimizer, model: nn.Module, **settings: Any) -> AcceleratedModel:
    plan = Plan().replace(**OTHERS_OFF, **{"optimizer_8bit": "on", "trust": "checked", **settings})
    return accelerate(model, plan, optimizers=optimizer, host=Host(kind="cpu", device_name="a CPU"))


def train(
    model: nn.Module, optimizer: Optimizer, steps: int = 10, handle: AcceleratedModel | None = None
) -> list[float]:
    """A regression; its losses."""
    generator = torch.Generator().manual_seed(1)
    dtype = next(model.parameters()).dtype
    target = torch.randn(64, 64, generator=generator).to(dtype)
    losses = []
    for _ in range(steps):
        inputs = torch.randn(32, 64, generator=generator).to(dtype)
        loss = (model(inputs) - inputs @ target).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if handle is not None:
            with handle.step():  # in which what the technique has to say is heard
                pass
    return losses


def moments(optimizer: Optimizer) -> list[Any]:
    return [value for state in optimizer.state.values() for name, value in state.items() if name != "step"]


def packed(optimizer: Optimizer) -> list[Any]:
    return [value for value in moments(optimizer) if eight_bits.is_packed(value)]


def assert_plain(optimizer: Optimizer, reference: Optimizer) -> None:
    """Saved, it has the keys, shapes, dtypes and classes that a plain one has."""
    saved, expected = optimizer.state_dict(), reference.state_dict()
    assert saved["param_groups"] == expected["param_groups"]
    assert saved["state"].keys() == expected["state"].keys()
    for index, state in saved["state"].items():
        assert state.keys() == expected["state"][index].keys()
        for name, value in state.items():
            other = expected["state"][index][name]
            described = [(type(t), t.shape, t.dtype, t.device, t.stride()) for t in (value, other)]
            assert described[0] == described[1], name
