"""Flash attention as a technique: what it tries, keeps, leaves alone and says."""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import re
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_accel import AccelWarning
from lightning_accel.experiment.trial import Trial
from lightning_accel.techniques.flash_attention.backends import BACKENDS
from lightning_accel.techniques.flash_attention.call import AttentionCall, sdpa
from support import timm_like
from support.attention_lookalikes import LEFT_ALONE
from support.attention_module import Attention
from support.attention_zoo import FOUND
from support.techniques.flash_attention.technique_runs import Discards, Stack, batch, choices, clock, start, step

pytestmark = pytest.mark.numbers

# -- found, tried, kept --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["einsum_positions_first", "padding_between_reshapes", "shifted_windows"])
def test_a_named_backend_is_used_wherever_the_numbers_agree(name: str) -> None:
    model = Stack(FOUND[name], depth=1)
    plain, handle, x = copy.deepcopy(model), start(model), batch()
    for _ in range(2):
        torch.testing.assert_close(step(model, handle, x), step(plain, None, x), rtol=1e-4, atol=1e-5)
    assert handle.report.applied("flash_attention") == ["layers.0"]
    handle.undo()
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("name", ["weights_returned", "soft_capped"])
def test_what_is_left_alone_is_reported_with_its_reason(name: str) -> None:
    kind, reason = LEFT_ALONE[name]
    model, x = Stack(kind, depth=1), batch()
    plain, handle = copy.deepcopy(model), start(model, {"force": ["layers"]})
    for _ in range(2):
        assert torch.equal(step(model, handle, x)[0], step(plain, None, x)[0])
    assert re.sub("0x[0-9a-f]+", "0x", handle.report.refused("flash_attention")["layers.0"]) == reason
    handle.undo()


class Dropping(nn.Module):
    """Attention and dropout behind it, which fills in the order of the memory."""

    def __init__(self, spelling: str) -> None:
        super().__init__()
        self.attention = {"multihead": Discards, "by hand": FOUND["at_sign"]}[spelling](dropout=0.2)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.attention(x))


class Bare(nn.Module):
    """Heads as they come out of the product, some dropped: (B, T, 32) → (B, T, 32)."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 4, 8).permute(2, 0, 3, 1, 4)
        heads = F.dropout((q @ k.mT / 8**0.5).softmax(-1) @ v, 0.2, self.training)
        return heads.transpose(1, 2).reshape(x.shape)


@pytest.mark.parametrize("kind", ["multihead", "by hand", "bare"])
def test_with_dropout_behind_it_a_run_trains_as_plainly(kind: str) -> None:
    model = Stack(Bare) if kind == "bare" else Stack(Dropping, spelling=kind)
    plain, handle = copy.deepcopy(model), start(model)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (model, plain)]
    for index in range(5):
        x, losses = batch(), []
        for one, optimizer, given in zip((model, plain), optimizers, (handle, None), strict=True):
            torch.manual_seed(index)
            losses.append(step(one, given, x)[0])
            losses.append(torch.rand(()))  # what is drawn next tells how many were drawn
            optimizer.step()
        torch.testing.assert_close(losses[:2], losses[2:], rtol=1e-5, atol=0.0)
    assert len(handle.report.applied("flash_attention")) == 2
    handle.undo()


def test_attention_that_draws_otherwise_than_the_original_is_left_alone_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a GPU's kernels do: each has an order of its own."""

    def in_another_order(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return kernel(q.flip(0), k.flip(0), v.flip(0), *args, **kwargs).flip(0)

    kernel = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", in_another_order)
    model = Stack(FOUND["at_sign"], depth=1, dropout=0.2)
    handle = start(model, "auto")
    step(model, handle, batch())
    step(model, handle, batch())
    assert "random numbers fall on other elements" in handle.report.refused("flash_attention")["layers.0"]
    handle.undo()


def test_the_step_of_the_trial_is_the_originals_to_the_last_bit() -> None:
    model, x = Stack(FOUND["at_sign"]), batch()
    plain, handle = copy.deepcopy(model), start(model)
    assert all(map(torch.equal, step(model, handle, x), step(plain, None, x)))
    handle.undo()


def test_auto_keeps_what_the_clock_says_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    clock(monkeypatch, speed=1.5)
    model = Stack(FOUND["at_sign"])
    handle = start(model, "auto")
    step(model, handle, batch())
    assert set(choices(handle).values()) == {"sdpa"} or not choices(handle)
    step(model, handle, batch())
    assert set(choices(handle).values()) == {"sdpa"}
    assert "1.50x the speed here (10.00 → 6.67 ms a pass)" in handle.report.of("flash_attention").changes["layers.0"]
    handle.undo()


def test_auto_leaves_alone_what_is_slower_and_says_by_how_much(monkeypatch: pytest.MonkeyPatch) -> None:
    clock(monkeypatch, speed=0.8)
    model = Stack(FOUND["at_sign"])
    handle = start(model, "auto")
    for _ in range(2):
        step(model, handle, batch())
    assert handle.report.applied("flash_attention") == []
    assert "not faster by sdpa: 0.80x the speed here" in handle.report.refused("flash_attention")["layers.1"]
    handle.undo()


def test_sites_of_one_kind_share_a_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    timed = clock(monkeypatch, speed=2.0)
    model = Stack(FOUND["at_sign"], depth=4)
    handle = start(model, "auto")
    step(model, handle, batch())
    assert len(timed) == 1
    assert len(handle.report.applied("flash_attention")) == 4
    handle.undo()


def test_sites_of_one_kind_share_the_measurement_of_what_they_may_be_off_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that is seven roundings off is in doubt at every site, and asks for float64 at the first."""
    monkeypatch.setattr(type(BACKENDS["sdpa"]), "__call__", lambda self, call: (1 + 8e-7) * sdpa(call))
    in_float64, oracles = Trial._oracle, []

    def oracle(self: Trial, *args: Any) -> list[Tensor] | None:
        oracles.append(self)
        return in_float64(self, *args)

    monkeypatch.setattr(Trial, "_oracle", oracle)
    model = Stack(FOUND["at_sign"], depth=4)
    handle = start(model)
    step(model, handle, batch())
    assert len(handle.report.applied("flash_attention")) == 4
    assert len(oracles) == 1
    handle.undo()


def test_a_site_that_is_off_where_others_are_right_is_refused_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = itertools.count()

    def sometimes(self: Any, call: AttentionCall) -> Tensor:
        return (1.01 if next(calls) == 2 else 1.0) * sdpa(call)  # at the third site, as each calls it once

    monkeypatch.setattr(type(BACKENDS["sdpa"]), "__call__", sometimes)
    model = Stack(FOUND["at_sign"], depth=4)
    handle = start(model)
    step(model, handle, batch())
    assert list(handle.report.refused("flash_attention")) == ["layers.2"]
    handle.undo()


def test_other_numbers_are_refused_whatever_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(BACKENDS["sdpa"]), "__call__", lambda self, call: 1.01 * sdpa(call))
    model = Stack(FOUND["at_sign"])
    handle = start(model)
    with pytest.warns(AccelWarning, match="not in force anywhere: left alone: other numbers than the original"):
        step(model, handle, batch())
    assert set(handle.report.refused("flash_attention")) == {"layers.0", "layers.1"}
    handle.undo()


@pytest.mark.medium
def test_a_new_length_is_decided_again_once_for_its_class(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Stack(FOUND["causal_buffer"], depth=2)
    plain = copy.deepcopy(model)
    timed = clock(monkeypatch, speed=0.5)
    handle = start(model, "auto")
    step(model, handle, batch(length=8))
    timed.clear()
    clock(monkeypatch, speed=2.0)
    for length in (40, 48, 60, 40):  # one class: up to 64
        x = batch(length=length)
        torch.testing.assert_close(step(model, handle, x), step(plain, None, x), rtol=1e-4, atol=1e-5)
    assert sorted(choices(handle).values()) == ["original", "sdpa"]
    assert handle.report.applied("flash_attention") == ["layers.0", "layers.1"]
    handle.undo()


@pytest.mark.medium
def test_a_deterministic_run_never_asks_the_clock(monkeypatch: pytest.MonkeyPatch, determinism_restored: None) -> None:
    timed = clock(monkeypatch, speed=0.1)
    torch.use_deterministic_algorithms(True)
    model = Stack(FOUND["at_sign"])
    handle = start(model, "auto")
    for length in (8, 16, 32):
        step(model, handle, batch(length=length))
    assert not timed
    assert len(handle.report.applied("flash_attention")) == 2
    handle.undo()


def test_dropout_that_is_no_module_does_not_stand_in_the_way_of_a_trial() -> None:
    class Functional(Attention):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x)
            return self.merge(F.dropout((q @ k.mT).softmax(-1), 0.5, self.training) @ v)

    model = Stack(Functional)
    handle = start(model)
    step(model, handle, batch())
    assert len(handle.report.applied("flash_attention")) == 2
    handle.undo()


def test_a_module_that_keeps_its_weights_in_evaluation_only_is_fused_in_training() -> None:
    class Keeps(Attention):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x)
            weights = (q @ k.mT).softmax(-1)
            if not self.training:
                self.weights = weights
            return self.merge(weights @ v)

    model = Stack(Keeps, depth=1)
    handle, x = start(model), batch()
    for _ in range(2):
        step(model, handle, x)
        model.eval()
        with torch.no_grad(), handle.step("validate"):
            model(x)
        assert model.layers[0].weights.shape == (4, 4, 16, 16)
        model.train()
        del model.layers[0].weights
    assert handle.report.applied("flash_attention") == ["layers.0"]
    handle.undo()


def test_without_verification_it_is_fused_untried(monkeypatch: pytest.MonkeyPatch) -> None:
    timed = clock(monkeypatch, speed=0.1)
    model = Stack(FOUND["at_sign"])
    plain, handle, x = copy.deepcopy(model), start(model, "auto", trust="unchecked"), batch()
    for _ in range(2):
        torch.testing.assert_close(step(model, handle, x), step(plain, None, x), rtol=1e-4, atol=1e-5)
    assert not timed
    assert set(choices(handle).values()) == {"sdpa"}
    handle.undo()


WATCHED = {
    "by hand": (FOUND["scale_inside_the_queries"], "softmax", "off"),
    "by hand, checkpointed": (FOUND["scale_inside_the_queries"], "softmax", "full"),
    "switched": (functools.partial(timm_like.Attention, 32), "attn_drop", "off"),
}


@pytest.mark.parametrize("spelling", WATCHED)
def test_a_hook_on_a_part_of_one_of_several_equal_layers_sees_its_weights_at_every_step(spelling: str) -> None:
    kind, part, checkpointing = WATCHED[spelling]
    model, seen = Stack(kind), []
    getattr(model.layers[1], part).register_forward_hook(lambda module, args, output: seen.append(output.shape))
    handle = start(model, gradient_checkpointing=checkpointing)
    for _ in range(3):
        seen.clear()
        step(model, handle, batch())
        assert (4, 16, 16) in {(shape[0], *shape[2:]) for shape in seen}
    assert handle.report.applied("flash_attention") == ["layers.0"]
    assert "hook on its parts" in handle.report.refused("flash_attention")["layers.1"]
    handle.undo()


def test_a_model_is_released_when_the_run_is_over() -> None:
    model = Stack(FOUND["at_sign"])
    handle, released = start(model), weakref.ref(model)
    for _ in range(2):
        step(model, handle, batch())
    assert len(handle.report.applied("flash_attention")) == 2
    handle.undo()
    del model, handle
    gc.collect()
    assert released() is None
