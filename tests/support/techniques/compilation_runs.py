"""Compiled runs of a small transformer, for real or by a backend that runs graphs as they are."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from lightning_accel.assembly import AcceleratedModel, accelerate
from lightning_accel.core.host import Host
from lightning_accel.settings import Plan
from lightning_accel.techniques import compiled_blocks
from lightning_accel.techniques.compilation import CompileSetting
from support.models import TASKS

CPU = Host(kind="cpu", device_name="a CPU", compiler="g++")


def compiling(model: nn.Module, setting: CompileSetting | bool = "on", **more: Any) -> AcceleratedModel:
    host = more.pop("host", CPU)
    settings = {"precision": "32-true", "memory_format": "off", "inplace_activations": False, **more}
    settings.setdefault("flash_attention", "off")  # whose trial goes by the clock
    return accelerate(model, Plan().replace(compile=setting, **settings), host=host)


def run(model: nn.Module, handle: AcceleratedModel | None, steps: int = 3) -> list[float]:
    task = TASKS["transformer"]
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        inputs, targets = task.batch(step)
        optimizer.zero_grad()
        with handle.step() if handle else nullcontext():
            loss = task.loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


class Backend:
    """In place of TorchInductor: runs graphs as they are, does ``around`` first, and counts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, around: Callable[[], Any] = lambda: None) -> None:
        self.compiled = 0
        self.ran = 0

        def backend(graph: Any, inputs: Any) -> Callable[..., Any]:
            self.compiled += 1

            def call(*args: Any) -> Any:
                self.ran += 1
                around()
                return graph.forward(*args)

            return call

        def compile_call(module: nn.Module, options: dict[str, Any], *_: Any) -> None:
            module._compiled_call_impl = torch.compile(
                lambda *args, **kwargs: module._call_impl(*args, **kwargs), backend=backend
            )

        monkeypatch.setattr(compiled_blocks, "compile_call", compile_call)
