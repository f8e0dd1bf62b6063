"""Gradients of fused kernels are off by what their formula is off, where weights are nearly alike: and no farther."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_accel import Plan, accelerate
from lightning_accel.techniques.flash_attention.backend_trial import ByRows
from lightning_accel.techniques.flash_attention.backends import Sdpa
from lightning_accel.techniques.flash_attention.call import AttentionCall, sdpa
from support.errors import relative_error
from support.technique_table import off

pytestmark = [
    pytest.mark.numbers,
    pytest.mark.filterwarnings("ignore:flash_attention was asked for and is not in force"),
]

EXAMPLES = Path(__file__).parents[3] / "examples"

CALLS: dict[str, Callable[[AttentionCall], AttentionCall]] = {
    "plain": lambda call: call,
    "causal": lambda call: replace(call, is_causal=True),
    "scaled": lambda call: replace(call, scale=0.3),
    "padding": lambda call: replace(call, mask=(torch.arange(12) < 9)[None, None, None]),
    "learned bias": lambda call: replace(call, mask=torch.randn(1, 3, 12, 12, dtype=torch.float64, requires_grad=True)),
    "window": lambda call: replace(call, window=(3, 2)),
}


def results(attend: Any, call: AttentionCall) -> list[Tensor]:
    given = [call.query, call.key, call.value, *([call.mask] if call.mask is not None else [])]
    output = attend(call)
    weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
    return [output, *torch.autograd.grad((output * weights).sum(), [t for t in given if t.requires_grad])]


@pytest.mark.parametrize("kind", CALLS)
def test_it_is_attention(kind: str) -> None:
    q, k, v = (torch.randn(2, 3, 12, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    call = CALLS[kind](AttentionCall(query=q, key=k, value=v))
    assert relative_error(results(ByRows(), call), results(sdpa, call)) < 1e-12


def trained(kernel: Callable[[AttentionCall], Tensor], monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What is refused in bfloat16, with this kernel, of a GPT that has not been trained."""
    monkeypatch.setattr(Sdpa, "__call__", lambda self, call: kernel(call))
    monkeypatch.syspath_prepend(EXAMPLES)
    torch.manual_seed(0)
    model = importlib.import_module("bytes_gpt").BytesGPT(dim=128, depth=2, num_heads=4, seq_len=256)
    handle = accelerate(
        model, Plan().replace(**off() | {"flash_attention": "sdpa", "precision": "bf16-mixed", "trust": "checked"})
    )
    for _ in range(2):
        tokens = torch.randint(0, 256, (4, 256))
        with handle.step():
            loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten())
        loss.backward()
    refused = handle.report.refused("flash_attention")
    handle.undo()
    return refused


class Scaled(torch.autograd.Function):
    """Nothing, and a gradient that is some per cent too large."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, by: float) -> Tensor:
        ctx.by = by
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.by, None


@pytest.mark.medium
def test_a_kernel_with_that_error_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    assert trained(sdpa, monkeypatch) == {}


@pytest.mark.medium
def test_a_kernel_with_a_larger_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(call: AttentionCall) -> Tensor:
        return sdpa(replace(call, query=Scaled.apply(call.query, 3.0)))

    assert "other numbers than the original" in trained(wrong, monkeypatch)["blocks.1.attn"]


@pytest.mark.medium
def test_a_kernel_whose_results_are_off_as_much_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "other numbers than the original" in trained(lambda call: sdpa(call) * 1.04, monkeypatch)["blocks.1.attn"]
