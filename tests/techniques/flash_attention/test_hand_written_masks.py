"""The masks of attention written by hand: recognised, read anew when they change, hiding what they hid, NaN and all."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager
from torch.fx import GraphModule

from lightning_accel.techniques.flash_attention.hand_written import HandWrittenSite
from lightning_accel.techniques.flash_attention.rewrite import fuse_attention
from support import attention_zoo
from support.attention_module import Attention
from support.attention_zoo import FOUND
from support.errors import relative_error
from support.techniques.flash_attention.hand_written_runs import ROUNDING, SDPA, assert_same, batch, make, results, run
from support.techniques.flash_attention.recorder import Recorder

pytestmark = pytest.mark.numbers

CAUSAL = ["function_outside", *(name for name in FOUND if name.startswith("causal"))]


@pytest.mark.parametrize("name", [name for name in CAUSAL if name != "causal_by_assignment"])
def test_a_causal_mask_given_as_a_tensor_becomes_causal_and_no_mask(name: str) -> None:
    recorder = Recorder()
    run(HandWrittenSite("attention", make(FOUND[name])), batch(2, 16), recorder)
    assert recorder.calls[0].is_causal
    assert recorder.calls[0].mask is None


def test_a_local_mask_given_as_a_tensor_becomes_a_window_and_no_mask() -> None:
    module, recorder = make(FOUND["local_window"]), Recorder()
    assert_same(module, HandWrittenSite("attention", module), batch(2, 16), backend=recorder)
    assert recorder.calls[0].window == (3, 3)
    assert recorder.calls[0].mask is None


def test_a_causal_mask_handed_in_by_the_caller_is_recognised() -> None:
    class Handed(Attention):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.merge(attention_zoo.naive_attention(*self.qkv(x), mask=mask))

    module, recorder, x = make(Handed), Recorder(), batch(2, 16)
    site = HandWrittenSite("attention", module)
    causal, other = torch.ones(16, 16).tril(), torch.ones(16, 16).tril(-1) + torch.eye(16).flip(0)
    site.run(recorder, Handed.forward, (x, causal), {})
    assert recorder.calls[-1].is_causal
    with torch.no_grad():
        actual = site.run(recorder, Handed.forward, (x, other), {})
        assert relative_error([actual], [module(x, other)]) < ROUNDING
    assert not recorder.calls[-1].is_causal


def test_a_mask_on_the_host_is_left_to_the_assignment_that_takes_it_for_scores_on_a_device() -> None:
    """Simulated by meta tensors: ``masked_fill`` would raise."""
    site, recorder = HandWrittenSite("attention", make(FOUND["causal_by_assignment"]).to("meta")), Recorder()
    run(site, batch(2, 16).to("meta"), recorder)
    assert recorder.calls == []
    assert site.nothing_found() == "its scores are used elsewhere"


def test_a_mask_that_is_overwritten_is_looked_at_again() -> None:
    module, recorder, x = make(FOUND["causal_buffer"]), Recorder(), batch(2, 16)
    site = HandWrittenSite("attention", module)
    run(site, x, recorder)
    module.lower[:, 0] = 0
    module.lower[0, 0] = 1
    module.lower[1:, 3] = 1
    with torch.no_grad():
        assert relative_error([run(site, x, recorder)], [module(x)]) < ROUNDING
    assert not recorder.calls[-1].is_causal


def test_a_mask_written_in_the_forward_itself_is_read_after_the_writing() -> None:
    class Writes(Attention):
        def forward(self, x: Tensor) -> Tensor:
            T = x.shape[1]
            q, k, v = self.qkv(x)
            mask = torch.zeros(T, T, dtype=torch.bool)
            mask[:, T // 2] = True
            return self.merge((q @ k.mT).masked_fill(mask, float("-inf")).softmax(-1) @ v)

    module = make(Writes)
    assert_same(module, HandWrittenSite("attention", module), batch(2, 16))


@pytest.mark.parametrize("fill", [-math.inf, -1e9, -1e4, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("how", ["masked_fill", "added", "where"])
def test_rows_that_hide_every_key_are_as_before_nan_or_not(how: str, fill: float) -> None:
    class Rows(Attention):
        def forward(self, x: Tensor, hide: Tensor) -> Tensor:
            q, k, v = self.qkv(x)
            scores = q @ k.mT
            if how == "masked_fill":
                scores = scores.masked_fill(hide, fill)
            elif how == "where":
                scores = torch.where(~hide, scores, fill)
            else:
                scores = scores + torch.zeros(hide.shape).masked_fill(hide, fill)
            return self.merge(scores.softmax(-1) @ v)

    module, x = make(Rows), batch(2, 16)
    hide = torch.zeros(2, 1, 16, 16, dtype=torch.bool)
    hide[0, 0, 3] = hide[1, 0, :, 5:] = True
    site = HandWrittenSite("attention", module)
    expected = results(module, lambda x: module(x, hide), x)
    actual = results(module, lambda x: site.run(SDPA, Rows.forward, (x, hide), {}), x)
    assert any(tensor.isnan().any() for tensor in expected) == (fill == -math.inf)
    assert relative_error(actual, expected) < ROUNDING


def test_padded_queries_under_a_causal_mask_attend_to_what_they_did() -> None:
    class LeftPadded(Attention):
        def forward(self, x: Tensor, real: Tensor) -> Tensor:
            T = x.shape[1]
            q, k, v = self.qkv(x)
            scores = (q @ k.mT).masked_fill(self.lower[:T, :T] == 0, float("-inf"))
            return self.merge(scores.masked_fill(~real[:, None, None], -1e9).softmax(-1) @ v)

    module, x = make(LeftPadded), batch(2, 16)
    real = torch.ones(2, 16, dtype=torch.bool)
    real[0, :4] = False
    site = HandWrittenSite("attention", module)
    expected = results(module, lambda x: module(x, real), x)
    actual = results(module, lambda x: site.run(SDPA, LeftPadded.forward, (x, real), {}), x)
    assert relative_error(actual, expected) < ROUNDING


CAUSAL_AND_PADDED = {
    "filled with -inf, added lowest": (-math.inf, torch.finfo(torch.float32).min, True),
    "filled with -inf, added -1e9": (-math.inf, -1e9, True),
    "filled and added -1e9": (-1e9, -1e9, True),
    "filled and added -inf": (-math.inf, -math.inf, True),
    "filled and added -1e4": (-1e4, -1e4, True),
    "filled with -inf twice": (-math.inf, -math.inf, False),
    "filled with -inf, then with -1e9": (-math.inf, -1e9, False),
    "filled with -1e9, then with -1e4": (-1e9, -1e4, False),
    "filled with -1e4, then with -inf": (-1e4, -math.inf, False),
}


def left_padded(how: str) -> tuple[nn.Module, Tensor, Tensor]:
    """A module with a causal mask, its input, and where that is real: not its beginning, nor any of the last sample."""
    future, padding, is_added = CAUSAL_AND_PADDED[how]

    class LeftPadded(Attention):
        def forward(self, x: Tensor, real: Tensor) -> Tensor:
            T = x.shape[1]
            q, k, v = self.qkv(x)
            scores = (q @ k.mT).masked_fill(self.lower[:T, :T] == 0, future)
            hidden = torch.zeros(real.shape).masked_fill(~real, padding)[:, None, None]
            scores = scores + hidden if is_added else scores.masked_fill(~real[:, None, None], padding)
            return self.merge(scores.softmax(-1) @ v)

    real = torch.ones(3, 16, dtype=torch.bool)
    real[0, :6] = real[2] = False
    return make(LeftPadded), torch.randn(3, 16, 32), real


@pytest.mark.parametrize("how", CAUSAL_AND_PADDED)
def test_left_padding_under_a_causal_mask_is_as_before_gradients_and_nan_too(how: str) -> None:
    module, x, real = left_padded(how)
    site = HandWrittenSite("attention", module)
    expected = results(module, lambda x: module(x, real), x)
    actual = results(module, lambda x: site.run(SDPA, type(module).forward, (x, real), {}), x)
    assert relative_error(actual, expected) < ROUNDING


@pytest.mark.parametrize("how", CAUSAL_AND_PADDED)
def test_in_a_graph_for_a_compiler_which_has_no_values_left_padding_is_as_before(how: str) -> None:
    def fuse(graph: GraphModule, inputs: list[Tensor]) -> Any:
        assert any(finding.form for finding in fuse_attention(graph))
        return aot_eager(graph, inputs)

    module, x, real = left_padded(how)
    with torch.no_grad():
        assert relative_error([torch.compile(module, backend=fuse)(x, real)], [module(x, real)]) < ROUNDING


def test_a_learned_bias_that_carries_a_mask_keeps_its_nan() -> None:
    class Biased(Attention):
        def forward(self, x: Tensor, real: Tensor) -> Tensor:
            T = x.shape[1]
            q, k, v = self.qkv(x)
            bias = self.relative[:, :T, :T] + torch.zeros(len(x), 1, 1, T).masked_fill(~real[:, None, None], -math.inf)
            return self.merge((q @ k.mT + bias).softmax(-1) @ v)

    module, x = make(Biased), torch.randn(2, 8, 32)
    real = torch.tensor([[True], [False]]).expand(2, 8)
    site = HandWrittenSite("attention", module)
    expected = results(module, lambda x: module(x, real), x)
    actual = results(module, lambda x: site.run(SDPA, Biased.forward, (x, real), {}), x)
    assert relative_error(actual, expected) < ROUNDING


@pytest.mark.parametrize("shape", [(), (16,), (16, 1), (2, 1, 1, 16), (2, 1, 16, 1), (4, 16, 16), (2, 4, 16, 16)])
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.float32])
def test_masks_broadcast_as_they_did(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    class Masked(Attention):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            q, k, v = self.qkv(x)
            return self.merge((q @ k.mT).masked_fill(mask == 0, -1e9).softmax(-1) @ v)

    module, x = make(Masked), batch(2, 16)
    mask = (torch.rand(shape) < 0.7).to(dtype)
    site = HandWrittenSite("attention", module)
    expected = results(module, lambda x: module(x, mask), x)
    actual = results(module, lambda x: site.run(SDPA, Masked.forward, (x, mask), {}), x)
    assert relative_error(actual, expected) < ROUNDING


def test_a_mask_that_another_tensor_is_written_by_is_still_seen_to_change() -> None:
    class Writes(Attention):
        def forward(self, x: Tensor) -> Tensor:
            T = x.shape[1]
            q, k, v = self.qkv(x)
            hide, bias = torch.zeros(T, T, dtype=torch.bool), torch.zeros(T, T)
            bias.masked_fill_(hide, 1.0)
            part = hide[:, :2]
            part |= True
            return self.merge((q @ k.mT + bias).masked_fill(hide, -1e9).softmax(-1) @ v)

    module = make(Writes)
    assert_same(module, HandWrittenSite("attention", module), batch(2, 16))


@pytest.mark.parametrize("fill", [-math.inf, -1e9])
def test_weights_that_are_set_to_zero_where_their_scores_are_hidden_leave_zeros_and_no_nan(fill: float) -> None:
    class HiddenTwice(Attention):
        def forward(self, x: Tensor) -> Tensor:
            padding = (x.abs().sum(-1) == 0)[:, None, None]
            q, k, v = self.qkv(x)
            return self.merge((q @ k.mT).masked_fill(padding, fill).softmax(-1).masked_fill(padding, 0) @ v)

    module, x, recorder = make(HiddenTwice), batch(3, 16), Recorder()
    x[1] = 0
    assert_same(module, HandWrittenSite("attention", module), x, backend=recorder)
    assert recorder.calls


def test_a_mask_that_was_one_of_two_joined_is_still_the_one_it_was() -> None:
    class Joins(Attention):
        def forward(self, x: Tensor, causal: Tensor, other: Tensor) -> Tensor:
            both = causal & other
            q, k, v = self.qkv(x)
            joined = (q @ k.mT).masked_fill(~both, -1e9).softmax(-1) @ v
            return self.merge(joined + (q @ k.mT).masked_fill(~causal, -1e9).softmax(-1) @ v)

    module, x = make(Joins), batch(2, 16)
    masks = torch.ones(16, 16, dtype=torch.bool).tril(), torch.eye(16, dtype=torch.bool)
    site = HandWrittenSite("attention", module)
    expected = results(module, lambda x: module(x, *masks), x)
    actual = results(module, lambda x: site.run(SDPA, Joins.forward, (x, *masks), {}), x)
    assert relative_error(actual, expected) < ROUNDING
