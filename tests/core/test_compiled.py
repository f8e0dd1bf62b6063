"""Torch keeps eight versions of a piece of code, and runs what is past them eagerly, without a word."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_accel.assembly import accelerate
from lightning_accel.core import compiled
from lightning_accel.core.host import Host
from lightning_accel.settings import Plan

CPU = Host(kind="cpu", device_name="a CPU", compiler="g++")


class Broken(nn.Module):
    """A block that the compiler has to capture in two parts."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        torch._dynamo.graph_break()
        return x.relu()


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The graphs that the compiler gets; they run as they are."""
    graphs: list[Any] = []

    def compile_fx(graph: Any, inputs: Any, config_patches: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's, of itself, on import
        importlib.import_module("torch._inductor.compile_fx")
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_fx)
    return graphs


@pytest.mark.medium
def test_many_models_compiled_in_one_process_all_stay_compiled(captured: list[Any]) -> None:
    for width in range(1, 21):
        layer = nn.Linear(width, 2)
        compiled.compile_call(layer, {})
        layer(torch.randn(3, width))
    assert len(captured) == 20


@pytest.mark.medium
def test_blocks_with_a_graph_break_all_stay_compiled(captured: list[Any]) -> None:
    blocks = nn.ModuleList(Broken(width) for width in range(1, 15))
    handle = accelerate(blocks, Plan(precision="32-true", compile="on", trust="unchecked"), host=CPU)
    for _ in range(3):
        with handle.step():
            for width, block in enumerate(blocks, start=1):
                block(torch.randn(3, width))
    handle.undo()
    assert len(captured) >= 2 * len(blocks)


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # torch's, when the compiler is imported
def test_a_module_that_lightning_unwrapped_is_compiled() -> None:
    """It is the original, whose methods Lightning has replaced by compiled ones."""
    from lightning.pytorch import LightningModule
    from lightning.pytorch.utilities.compile import from_compiled, to_uncompiled

    module = LightningModule()
    assert not compiled.is_compiled(module)
    assert compiled.is_compiled(from_compiled(torch.compile(module)))
    assert not compiled.is_compiled(to_uncompiled(module))
