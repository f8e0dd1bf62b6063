"""What multihead_forward hands to its backend, and what is kept for the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lightning_accel.techniques.flash_attention.call import AttentionCall
from lightning_accel.techniques.flash_attention.multihead import FlashMultiheadAttention, multihead_forward
from support.techniques.flash_attention.multihead_cases import BATCH, EMBED_DIM, NUM_HEADS, Sizes, inputs, padding, pair
from support.techniques.flash_attention.recorder import Recorder

pytestmark = pytest.mark.numbers


class TestTheCallThatTheBackendGets:
    @staticmethod
    def call(rows: int = 5, columns: int = 5, **kwargs: Any) -> AttentionCall:
        recorder = Recorder()
        plain, _ = pair(batch_first=True)
        tensors, _ = inputs(plain, "batch first", rows, columns)
        multihead_forward(plain, *tensors, **{"need_weights": False, **kwargs}, backend=recorder)
        (call,) = recorder.calls
        return call

    def test_heads_stand_before_the_sequence(self) -> None:
        call = self.call(rows=5, columns=7)

        assert call.query.shape == (BATCH, NUM_HEADS, 5, EMBED_DIM // NUM_HEADS)
        assert call.key.shape == call.value.shape == (BATCH, NUM_HEADS, 7, EMBED_DIM // NUM_HEADS)
        assert call.mask is None
        assert call.scale is None

    def test_padding_alone_stays_one_row_of_booleans_that_take_part(self) -> None:
        ignored = padding(Sizes(BATCH, 5, 5, is_one_sample=False))
        call = self.call(key_padding_mask=ignored)

        assert call.mask is not None
        assert call.mask.shape == (BATCH, 1, 1, 5)
        assert torch.equal(call.mask[:, 0, 0], ~ignored)

    def test_a_causal_hint_costs_no_mask(self) -> None:
        call = self.call(attn_mask=torch.ones(5, 5, dtype=torch.bool).triu(1), is_causal=True)

        assert call.is_causal
        assert call.mask is None

    def test_a_causal_hint_beside_padding_is_a_mask(self) -> None:
        ignored = torch.zeros(BATCH, 5, dtype=torch.bool)
        call = self.call(attn_mask=torch.ones(5, 5, dtype=torch.bool).triu(1), is_causal=True, key_padding_mask=ignored)

        assert not call.is_causal
        assert call.mask is not None
        assert (call.mask.shape, call.mask.dtype) == ((BATCH, 1, 5, 5), torch.bool)

    def test_a_mask_is_not_repeated_for_every_head(self) -> None:
        call = self.call(attn_mask=torch.zeros(5, 5, dtype=torch.float64))

        assert call.mask is not None
        assert call.mask.shape == (1, 1, 5, 5)

    @pytest.mark.parametrize("training", [True, False])
    def test_weights_are_dropped_in_training_only(self, training: bool) -> None:
        recorder = Recorder()
        plain, _ = pair(dropout=0.25)
        tensors, _ = inputs(plain, "sequence first", 5, 5)
        multihead_forward(plain.train(training), *tensors, need_weights=False, backend=recorder)

        assert recorder.calls[0].dropout_p == (0.25 if training else 0.0)


def saved_bytes(call: Callable[[], Any]) -> int:
    """What autograd keeps for the backward pass, each storage once."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        out = call()  # noqa: F841  alive, so that no storage takes another's place
    return sum(kept.values())


def test_memory_of_weights_that_nobody_reads_grows_linearly() -> None:
    attn = FlashMultiheadAttention(8, 2, batch_first=True)

    def forward(length: int) -> Any:
        x = torch.randn(1, length, 8)
        out, _ = attn(x, x, x)
        return out

    short, long = (saved_bytes(lambda length=length: forward(length)) for length in (512, 2048))
    assert long < 4.1 * short
