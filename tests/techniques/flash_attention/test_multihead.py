"""FlashMultiheadAttention computes what nn.MultiheadAttention of the same weights does, and refuses what it refuses."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_accel.techniques.flash_attention.multihead import FlashMultiheadAttention
from support.techniques.flash_attention.multihead_cases import (
    EMBED_DIM,
    LAYOUTS,
    MASKS,
    NUM_HEADS,
    OPTIONS,
    TOLERANCES,
    as_float,
    assert_same,
    causal,
    inputs,
    padding,
    pair,
    results,
)

pytestmark = pytest.mark.numbers


@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_outputs_and_gradients_are_those_of_torch(layout: str, options: str, masks: str) -> None:
    plain, flash = pair(batch_first=layout == "batch first", **OPTIONS[options])
    tensors, sizes = inputs(plain, layout, rows=5, columns=7)
    kwargs = {**MASKS[masks](sizes), "need_weights": False}

    assert_same(results(flash, tensors, **kwargs), results(plain, tensors, **kwargs))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", ["self", "memory", "own keys"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("training", [True, False])
def test_however_the_inputs_share_tensors(training: bool, layout: str, kind: str, bias: bool) -> None:
    plain, flash = (m.train(training) for m in pair(batch_first=layout == "batch first", bias=bias))
    tensors, sizes = inputs(plain, layout, rows=5, columns=5, kind=kind)
    kwargs = {**MASKS["causal and padding"](sizes), "need_weights": False}

    assert_same(results(flash, tensors, **kwargs), results(plain, tensors, **kwargs))


@pytest.mark.parametrize("masks", ["no mask", "bool mask and padding", "causal"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (1, 9), (17, 17), (33, 5)])
def test_lengths_and_dtypes(rows: int, columns: int, dtype: torch.dtype, masks: str) -> None:
    plain, flash = pair(dtype, batch_first=True)
    tensors, sizes = inputs(plain, "batch first", rows, columns)
    kwargs = {**MASKS[masks](sizes), "need_weights": False}

    assert_same(results(flash, tensors, **kwargs), results(plain, tensors, **kwargs), dtype)


@pytest.mark.parametrize("averaged", [True, False])
@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_that_are_read_are_those_of_torch(layout: str, masks: str, averaged: bool) -> None:
    plain, flash = pair(batch_first=layout == "batch first", add_bias_kv=True)
    tensors, sizes = inputs(plain, layout, rows=5, columns=7)
    kwargs = {**MASKS[masks](sizes), "average_attn_weights": averaged}

    assert_same(results(flash, tensors, **kwargs), results(plain, tensors, **kwargs))


@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("options", OPTIONS)
def test_weights_that_are_thrown_away_leave_the_output_as_it_was(options: str, masks: str) -> None:
    plain, flash = pair(batch_first=True, **OPTIONS[options])
    tensors, sizes = inputs(plain, "batch first", rows=5, columns=7)
    kwargs = MASKS[masks](sizes)

    def output(module: nn.Module) -> Tensor:
        out, _ = module(*tensors, **kwargs)
        return out  # type: ignore[no-any-return]

    torch.testing.assert_close(output(flash), output(plain), **TOLERANCES[torch.float64])


def test_a_wrong_causal_hint_counts_only_where_torch_goes_by_it() -> None:
    plain, flash = pair(batch_first=True)
    tensors, _ = inputs(plain, "batch first", rows=3, columns=7)
    bottom_right = torch.ones(3, 7, dtype=torch.bool).triu(5)

    def output(module: nn.Module) -> Tensor:
        return module(*tensors, attn_mask=bottom_right, is_causal=True)[0]  # type: ignore[no-any-return]

    torch.testing.assert_close(output(flash), output(plain))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_that_see_nothing_are_those_of_torch_without_weights(layout: str) -> None:
    plain, flash = pair(batch_first=layout == "batch first")
    tensors, sizes = inputs(plain, layout, rows=5, columns=7)
    mask = causal(sizes)
    mask[2] = True
    unseen = torch.ones_like(padding(sizes))

    for masks in ({"attn_mask": mask}, {"key_padding_mask": unseen}, {"attn_mask": mask, "key_padding_mask": unseen}):
        kwargs = {**masks, "need_weights": False}
        assert_same(results(flash, tensors, **kwargs), results(plain, tensors, **kwargs))


@pytest.mark.parametrize("masks", ["no mask", "bool padding", "bool mask", "causal"])
def test_without_gradients_the_output_is_that_of_the_native_kernel(masks: str) -> None:
    plain, flash = (m.eval() for m in pair(batch_first=True))
    tensors, sizes = inputs(plain, "batch first", rows=5, columns=5, kind="self")
    kwargs = {**MASKS[masks](sizes), "need_weights": False}

    with torch.inference_mode():
        torch.testing.assert_close(flash(*tensors, **kwargs)[0], plain(*tensors, **kwargs)[0])


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("masks", ["no mask", "bool padding", "float mask", "causal"])
def test_under_autocast(masks: str, options: str) -> None:
    plain, flash = pair(torch.float32, batch_first=True, **OPTIONS[options])
    tensors, sizes = inputs(plain, "batch first", rows=5, columns=7)
    kwargs = {**MASKS[masks](sizes), "need_weights": False}
    if "attn_mask" in kwargs and kwargs["attn_mask"].is_floating_point():
        kwargs["attn_mask"] = kwargs["attn_mask"].float()

    with torch.autocast("cpu", torch.bfloat16):
        actual, expected = results(flash, tensors, **kwargs), results(plain, tensors, **kwargs)

    assert actual[0].dtype == torch.bfloat16
    assert_same(actual, expected, torch.bfloat16)


@pytest.mark.parametrize("padded", [True, False])
def test_gradients_are_the_derivatives(padded: bool) -> None:
    flash = FlashMultiheadAttention(
        4, 2, add_bias_kv=True, add_zero_attn=True, kdim=2, vdim=3, batch_first=True, dtype=torch.float64
    )
    for parameter in flash.parameters():
        nn.init.normal_(parameter)
    tensors = [torch.randn(1, 3, width, dtype=torch.float64, requires_grad=True) for width in (4, 2, 3)]
    masks = {"key_padding_mask": torch.tensor([[False, False, True]])} if padded else {}

    def output(*tensors: Tensor) -> Tensor:
        return flash(*tensors[:3], need_weights=False, **masks)[0]  # type: ignore[no-any-return]

    assert torch.autograd.gradcheck(output, (*tensors, *flash.parameters()))


def test_the_gradient_of_a_float_mask() -> None:
    plain, flash = pair(batch_first=True)
    tensors, sizes = inputs(plain, "batch first", rows=5, columns=7)
    bias = torch.randn(sizes.batch * NUM_HEADS, 5, 7, dtype=torch.float64, requires_grad=True)
    gradients = [
        torch.autograd.grad(m(*tensors, attn_mask=bias, need_weights=False)[0].sum(), bias)[0] for m in (flash, plain)
    ]

    torch.testing.assert_close(*gradients)


def test_masks_of_different_kinds_are_added_with_the_warning_of_torch() -> None:
    plain, flash = pair(batch_first=True)
    tensors, sizes = inputs(plain, "batch first", rows=5, columns=7)
    kwargs = {"attn_mask": as_float(causal(sizes)), "key_padding_mask": padding(sizes), "need_weights": False}

    with pytest.warns(UserWarning, match="mismatched key_padding_mask and attn_mask"):
        actual = results(flash, tensors, **kwargs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = results(plain, tensors, **kwargs)
    assert_same(actual, expected)


FAULTS: dict[str, Callable[[Tensor], dict[str, Any]]] = {
    "no dimensions": lambda x: {"query": x.sum()},
    "four dimensions": lambda x: {"query": x[None]},
    "width of the query": lambda x: {"query": x[..., :-1]},
    "width of the keys": lambda x: {"key": x[..., :-1], "value": x[..., :-1]},
    "keys of one sample": lambda x: {"key": x[0]},
    "values of one sample": lambda x: {"value": x[0]},
    "keys and values of other lengths": lambda x: {"key": x[:, :-1]},
    "another batch": lambda x: {"key": x[:1], "value": x[:1]},
    "causal without a mask": lambda x: {"is_causal": True},
    "dimensions of the padding": lambda x: {"key_padding_mask": torch.zeros(5, dtype=torch.bool)},
    "length of the padding": lambda x: {"key_padding_mask": torch.zeros(2, 4, dtype=torch.bool)},
    "dtype of the padding": lambda x: {"key_padding_mask": torch.zeros(2, 5, dtype=torch.int64)},
    "dimensions of the mask": lambda x: {"attn_mask": torch.zeros(5, dtype=torch.bool)},
    "shape of the mask": lambda x: {"attn_mask": torch.zeros(5, 4, dtype=torch.bool)},
    "heads of the mask": lambda x: {"attn_mask": torch.zeros(5, 5, 5, dtype=torch.bool)},
    "dtype of the inputs": lambda x: {"query": x.double(), "key": x.double(), "value": x.double()},
    "dtype of the mask": lambda x: {"attn_mask": torch.zeros(5, 5, dtype=torch.uint8)},
}


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("fault", FAULTS)
def test_what_torch_refuses_is_refused_in_its_words(fault: str, need_weights: bool) -> None:
    plain, flash = pair(torch.float32, batch_first=True)
    x = torch.randn(2, 5, EMBED_DIM)
    kwargs = {"query": x, "key": x, "value": x, "need_weights": need_weights, **FAULTS[fault](x)}

    with pytest.raises((AssertionError, RuntimeError)) as theirs:
        plain(**kwargs)
    with pytest.raises(type(theirs.value)) as ours:
        flash(**kwargs)
    assert str(ours.value) == str(theirs.value)


def test_a_bias_of_another_dtype_is_taken_where_torch_takes_it() -> None:
    plain, flash = pair(batch_first=True)
    x = torch.randn(2, 5, EMBED_DIM, dtype=torch.float64)
    for module in (plain, flash):
        module.in_proj_bias = nn.Parameter(module.in_proj_bias.half())

    torch.testing.assert_close(flash(x, x, x, need_weights=False), plain(x, x, x, need_weights=False))


def test_dropped_weights_average_to_those_that_were_not() -> None:
    attn = FlashMultiheadAttention(8, 2, dropout=0.3, batch_first=True)
    x = torch.randn(1, 6, 8).expand(4000, 6, 8)  # as many draws, in one call
    with torch.no_grad():
        dropped = attn(x, x, x, need_weights=False)[0]
        expected = attn.eval()(x[:1], x[:1], x[:1], need_weights=False)[0]

    standard_error = dropped.std(dim=0) / len(dropped) ** 0.5
    assert ((dropped.mean(dim=0) - expected[0]).abs() < 5 * standard_error).all()
    assert (standard_error > 0).all()


def test_weights_are_dropped_at_the_rate_asked_for() -> None:
    attn = FlashMultiheadAttention(1, 1, dropout=0.3, batch_first=True)
    with torch.no_grad():
        for parameter in attn.parameters():
            parameter.zero_()
        attn.in_proj_bias[2] = 1.0  # all values are 1, all weights are 1 / S
        attn.out_proj.weight.fill_(1.0)
        x = torch.zeros(20_000, 1, 1)
        out = attn(x, x, x, need_weights=False)[0].flatten()

    dropped = (out == 0).float().mean().item()
    assert dropped == pytest.approx(0.3, abs=5 * (0.3 * 0.7 / len(out)) ** 0.5)
    torch.testing.assert_close(out[out != 0], torch.full_like(out[out != 0], 1 / 0.7))


def test_dropped_output_and_weights_come_from_the_same_draw() -> None:
    plain, flash = pair(torch.float32, dropout=0.5)
    x = torch.randn(5, 2, EMBED_DIM)
    both = []
    for module in (flash, plain):
        torch.manual_seed(7)
        both.append(list(module(x, x, x)))

    assert_same(*both, torch.float32)


@pytest.mark.parametrize("kind", ["self", "memory", "own keys"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", ["training", "evaluation", "frozen"])
def test_results_and_gradients_lie_in_memory_as_torchs_do(mode: str, layout: str, kind: str) -> None:
    """Dropout behind it fills in that order. Torch has one more for inference, on its fast path."""

    def lying(module: nn.Module, tensors: list[Tensor], **kwargs: Any) -> list[Any]:
        with torch.set_grad_enabled(mode == "training"):
            out, weights = module(*tensors, **kwargs)
        gradients = torch.autograd.grad(out, [*dict.fromkeys(tensors)], torch.ones(out.shape)) if out.grad_fn else ()
        return [t.stride() for t in (out, *(() if weights is None else (weights,)), *gradients)]

    for bias, need_weights, masks in itertools.product((True, False), (True, False), ("no mask", "float mask")):
        plain, flash = pair(torch.float32, batch_first=layout == "batch first", bias=bias)
        tensors, sizes = inputs(plain, layout, rows=5, columns=5, kind=kind)
        kwargs = {name: mask.float() for name, mask in MASKS[masks](sizes).items()} | {"need_weights": need_weights}
        for module in (plain, flash):
            module.train(mode == "training").requires_grad_(mode != "frozen")
        assert lying(flash, tensors, **kwargs) == lying(plain, tensors, **kwargs)


@pytest.mark.parametrize("batch_first", [True, False])
def test_dropped_weights_that_nobody_reads_are_those_of_torch(batch_first: bool) -> None:
    plain, flash = pair(torch.float32, dropout=0.4, batch_first=batch_first)
    x = torch.randn(3, 5, EMBED_DIM)
    outputs = []
    for module in (plain, flash):
        torch.manual_seed(0)
        out, _ = module(x, x, x)
        outputs.append(torch.stack([out, torch.rand(out.shape)]))  # what is drawn next tells how many were drawn
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)
