"""Attention that was asked for by name or left alone, and nn.MultiheadAttention."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from lightning_accel import AccelWarning, FlashMultiheadAttention
from support.attention_zoo import FOUND
from support.techniques.flash_attention.technique_runs import Discards, Stack, batch, clock, start, step

pytestmark = pytest.mark.numbers


def test_off_does_nothing() -> None:
    model = Stack(FOUND["at_sign"])
    handle = start(model, "off")
    step(model, handle, batch())
    assert handle.report.of("flash_attention").status == "off"
    handle.undo()


def test_sites_can_be_skipped_by_path_and_by_class() -> None:
    model = nn.Sequential(Stack(FOUND["at_sign"]), Stack(FOUND["no_heads"]))
    handle = start(model, {"backend": "sdpa", "skip": ["0.layers.1", "no_heads"]})
    step(model, handle, batch())
    assert handle.report.applied("flash_attention") == ["0.layers.0"]
    assert set(handle.report.refused("flash_attention")) == {"0.layers.1", "1.layers.0", "1.layers.1"}
    handle.undo()


def test_a_forced_site_is_fused_whatever_the_clock_says(monkeypatch: pytest.MonkeyPatch) -> None:
    clock(monkeypatch, speed=0.5)
    model = Stack(FOUND["at_sign"])
    handle = start(model, {"force": ["layers.1"]})
    step(model, handle, batch())
    assert handle.report.applied("flash_attention") == ["layers.1"]
    handle.undo()


def test_a_name_that_matches_nothing_is_an_error_that_names_the_nearest() -> None:
    with pytest.raises(
        ValueError, match=r"flash_attention\.skip: Stack has no module or class 'layer\.0'; did you mean"
    ):
        start(Stack(FOUND["at_sign"]), {"skip": ["layer.0"]})


def test_asked_for_and_nothing_there_is_a_warning() -> None:
    with pytest.warns(AccelWarning, match="flash_attention was asked for and found no site"):
        start(nn.Sequential(nn.Linear(2, 2))).undo()


def test_a_softmax_at_the_end_of_a_model_does_not_take_its_attention_along() -> None:
    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.words = Stack(FOUND["at_sign"]), nn.Parameter(torch.randn(10, 32))

        def forward(self, x: Tensor) -> Tensor:
            return (self.body(x) @ self.words.t()).softmax(-1)

    model = Classifier()
    handle = start(model)
    step(model, handle, batch())
    assert handle.report.applied("flash_attention") == ["body.layers.0", "body.layers.1"]
    handle.undo()


# -- nn.MultiheadAttention -----------------------------------------------------------------------------------------


class Reads(Discards):
    def forward(self, x: Tensor) -> Tensor:
        out, weights = self.attention(x, x, x)
        return out * weights.mean()


def test_weights_that_nobody_reads_are_no_longer_computed() -> None:
    model = Stack(Discards, dropout=0.1)
    handle = start(model)
    step(model, handle, batch())
    assert handle.report.applied("flash_attention") == ["layers.0.attention", "layers.1.attention"]
    handle.undo()


def test_weights_that_somebody_reads_are() -> None:
    model, x = Stack(Reads), batch()
    plain, handle = copy.deepcopy(model), start(model, {"force": ["layers"]})
    for _ in range(2):
        assert torch.equal(step(model, handle, x)[0], step(plain, None, x)[0])
    assert "may be read" in handle.report.refused("flash_attention")["layers.0.attention"]
    handle.undo()


def test_the_layers_of_torch_are_taken_too() -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    plain, handle, x = copy.deepcopy(model), start(model), batch()
    for _ in range(2):
        torch.testing.assert_close(step(model, handle, x), step(plain, None, x), rtol=1e-4, atol=1e-5)
    assert len(handle.report.applied("flash_attention")) == 2
    handle.undo()


def test_the_module_of_our_own_is_left_as_it_is() -> None:
    model = nn.ModuleList([FlashMultiheadAttention(32, 4)])
    handle = start(model, {"force": ["0"]})
    assert handle.report.refused("flash_attention") == {"0": "already fused"}
    handle.undo()
