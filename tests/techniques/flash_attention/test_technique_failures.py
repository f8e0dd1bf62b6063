"""What goes wrong while attention is fused: the user's own errors come through, ours fall back to the original."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_accel import AccelWarning
from lightning_accel.engine import Engine
from lightning_accel.techniques.flash_attention import hand_written
from lightning_accel.techniques.flash_attention.backends import BACKENDS
from support.attention_module import Attention
from support.attention_zoo import FOUND
from support.techniques.flash_attention.technique_runs import Stack, batch, start, step

pytestmark = pytest.mark.numbers


def test_a_call_that_the_named_backend_lacks_something_for_is_said_once() -> None:
    class Wide(Attention):
        """Values wider than queries, which the CPU's flash kernel does not take."""

        def forward(self, x: Tensor) -> Tensor:
            return x + (self.q(x)[..., :8] @ self.k(x)[..., :8].mT).softmax(-1) @ self.v(x)

    model, x = Stack(Wide, depth=1), batch()
    handle = start(model, "flash")
    with pytest.warns(AccelWarning, match="values as wide as the queries: torch's own choice computes it"):
        step(model, handle, x)
    for _ in range(2):
        step(model, handle, x)
    handle.undo()


def test_an_error_of_the_users_own_code_comes_through_as_it_is() -> None:
    class Fussy(Attention):
        def forward(self, x: Tensor) -> Tensor:
            if x.shape[1] == 5:
                raise KeyError("five is too many")
            q, k, v = self.qkv(x)
            return self.merge((q @ k.mT).softmax(-1) @ v)

    model = Stack(Fussy)
    handle = start(model)
    for _ in range(2):
        step(model, handle, batch())
    with pytest.raises(KeyError, match="five is too many"):
        step(model, handle, batch(length=5))
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"), handle.step():
        model(torch.randn(2, 4, 31))
    handle.undo()


def test_a_gradient_penalty_is_noticed_before_anything_is_fused() -> None:
    model = Stack(FOUND["at_sign"], depth=1)
    plain, handle = copy.deepcopy(model), start(model, {"force": ["layers"]})

    def penalty(model: nn.Module, handle: Engine | None) -> Tensor:
        x = torch.linspace(-1, 1, 2 * 8 * 32).view(2, 8, 32).requires_grad_()
        if handle is None:
            loss = model(x).sum()
        else:
            with handle.step():
                loss = model(x).sum()
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        gradient.square().sum().backward()
        return gradient.detach()

    for _ in range(3):
        torch.testing.assert_close(penalty(model, handle), penalty(plain, None))
    assert "differentiated again" in handle.report.refused("flash_attention")["layers.0"]
    handle.undo()


@pytest.mark.medium
@pytest.mark.filterwarnings("ignore:flash_attention was asked for and is not in force")
def test_a_forward_that_is_another_at_every_call_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counts(Attention):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            q, k, v = self.qkv(x)
            return self.merge((q @ k.mT).softmax(-1) @ v) + 0 * self.calls

    model, x = Stack(Counts, depth=1), batch()
    handle = start(model)
    monkeypatch.setattr(hand_written, "_MAX_GRAPHS", 6)
    for _ in range(8):
        step(model, handle, x)
    assert "another one at every call" in handle.report.refused("flash_attention")["layers.0"]
    handle.undo()


@pytest.mark.filterwarnings("ignore:flash_attention was asked for and is not in force")
def test_a_forward_in_many_pieces_is_given_up_as_if_nothing_had_been_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of its pieces have run by then: they drew random numbers, and counted."""

    class InPieces(Attention):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            x = nn.functional.dropout(x, 0.5)
            torch._dynamo.graph_break()
            x = nn.functional.dropout(x, 0.5)
            torch._dynamo.graph_break()
            q, k, v = self.qkv(x)
            return self.merge((q @ k.mT).softmax(-1) @ v)

    model, x = Stack(InPieces, depth=1), batch()
    plain, handle = copy.deepcopy(model), start(model)
    monkeypatch.setattr(hand_written, "_MAX_PIECES", 2)
    losses = []
    for module, by in ((plain, None), (model, handle)):
        torch.manual_seed(0)
        losses.append([step(module, by, x)[0] for _ in range(3)])
    assert all(map(torch.equal, *losses))
    assert model.layers[0].calls == 3
    assert "in more than 2 pieces" in handle.report.refused("flash_attention")["layers.0"]
    handle.undo()


def test_what_fails_in_mid_run_falls_back_to_the_original(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Stack(FOUND["at_sign"], depth=2), batch()
    plain, handle = copy.deepcopy(model), start(model)
    step(model, handle, x)

    def fail(self: Any, call: Any) -> Tensor:
        raise RuntimeError("kernel gone")

    monkeypatch.setattr(type(BACKENDS["sdpa"]), "__call__", fail)
    with pytest.warns(AccelWarning, match="failed in mid-run: RuntimeError: kernel gone"):
        assert torch.equal(step(model, handle, x)[0], step(plain, None, x)[0])
    handle.undo()
