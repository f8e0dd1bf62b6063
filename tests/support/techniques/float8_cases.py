"""A small network at work in 8-bit floating point, which torchao computes in float32: simulated, on any machine."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_accel.core.host import Host
from lightning_accel.engine import Engine
from lightning_accel.techniques.float8 import Float8

H100 = Host(kind="cuda", device_name="NVIDIA H100", capability=(9, 0), native_bf16=True)
A100 = Host(kind="cuda", device_name="NVIDIA A100", capability=(8, 0), native_bf16=True)
CPU = Host(kind="cpu", device_name="a CPU")
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 16))


def simulated(model: nn.Module, recipe: str = "tensorwise", *, verify: bool = True, **options: Any) -> Engine:
    """The technique at work, emulated, in an engine of its own."""
    technique = Float8(recipe, emulate=True, **options)
    technique.run.verify = verify
    return Engine(model, H100, [technique])


def step(engine: Engine, inputs: Tensor | None = None) -> Tensor:
    inputs = torch.randn(32, 32, generator=torch.Generator().manual_seed(0)) if inputs is None else inputs
    with engine.step():
        outputs: Tensor = engine.model(inputs)
    outputs.float().square().mean().backward()
    return outputs.detach()


def in_float8(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if "forward" in vars(module)]
