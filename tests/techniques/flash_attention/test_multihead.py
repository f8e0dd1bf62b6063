"""FlashMultiheadAttention and multihead_forward against nn.MultiheadAttention of the same weights."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.parallel import DistributedDataParallel

from lightning_accel.techniques.base import Refusal
from lightning_accel.techniques.flash_attention.backends import Sdpa
from lightning_accel.techniques.flash_attention.call import AttentionCall
from lightning_accel.techniques.flash_attention.multihead import FlashMultiheadAttention, multihead_forward
from lightning_accel.techniques.flash_attention.multihead_site import MultiheadSite, find_multihead

EMBED_DIM, NUM_HEADS, BATCH = 12, 3, 2
LAYOUTS = ("batch first", "sequence first", "one sample")
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no bias": {"bias": False},
    "kdim, vdim": {"kdim": 5, "vdim": 7},
    "bias_kv": {"add_bias_kv": True},
    "zero_attn": {"add_zero_attn": True},
    "kdim, bias_kv, zero_attn": {"kdim": 5, "add_bias_kv": True, "add_zero_attn": True},
}
TOLERANCES = {
    torch.float64: {"rtol": 1e-10, "atol": 1e-12},
    torch.float32: {"rtol": 1e-4, "atol": 1e-5},
}


@dataclass(frozen=True)
class Sizes:
    batch: int
    rows: int
    columns: int
    is_one_sample: bool


def padding(sizes: Sizes) -> Tensor:
    """(B, S) or (S,), True for the last keys of every sample but the first."""
    lengths = sizes.columns - torch.arange(sizes.batch) % sizes.columns
    mask = torch.arange(sizes.columns) >= lengths[:, None]
    return mask[-1] if sizes.is_one_sample else mask


def random_mask(*shape: int) -> Tensor:
    """True at random, and nowhere in the first column, so that every query sees a key."""
    mask = torch.rand(shape) < 0.3
    mask[..., 0] = False
    return mask


def per_head(sizes: Sizes) -> Tensor:
    return random_mask(sizes.batch * NUM_HEADS, sizes.rows, sizes.columns)


def causal(sizes: Sizes) -> Tensor:
    return torch.ones(sizes.rows, sizes.columns, dtype=torch.bool).triu(1)


def as_float(mask: Tensor) -> Tensor:
    """Random numbers on the scores, -inf where the mask is True."""
    return torch.randn(mask.shape, dtype=torch.float64).masked_fill(mask, -torch.inf)


MASKS: dict[str, Callable[[Sizes], dict[str, Any]]] = {
    "no mask": lambda s: {},
    "bool padding": lambda s: {"key_padding_mask": padding(s)},
    "float padding": lambda s: {"key_padding_mask": as_float(padding(s))},
    "bool mask": lambda s: {"attn_mask": random_mask(s.rows, s.columns)},
    "float mask": lambda s: {"attn_mask": as_float(random_mask(s.rows, s.columns))},
    "bool mask per head": lambda s: {"attn_mask": per_head(s)},
    "float mask per head": lambda s: {"attn_mask": as_float(per_head(s))},
    "bool mask and padding": lambda s: {"attn_mask": causal(s), "key_padding_mask": padding(s)},
    "float mask and padding": lambda s: {"attn_mask": as_float(causal(s)), "key_padding_mask": as_float(padding(s))},
    "per head and padding": lambda s: {"attn_mask": per_head(s), "key_padding_mask": padding(s)},
    "causal": lambda s: {"attn_mask": causal(s), "is_causal": True},
    "causal and padding": lambda s: {"attn_mask": causal(s), "is_causal": True, "key_padding_mask": padding(s)},
}


def pair(dtype: torch.dtype = torch.float64, **options: Any) -> tuple[nn.MultiheadAttention, FlashMultiheadAttention]:
    """Torch's module and ours with the same weights, none of them zero."""
    plain = nn.MultiheadAttention(EMBED_DIM, NUM_HEADS, dtype=dtype, **options)
    for parameter in plain.parameters():
        nn.init.normal_(parameter, std=0.3)
    flash = FlashMultiheadAttention(EMBED_DIM, NUM_HEADS, dtype=dtype, **options)
    flash.load_state_dict(plain.state_dict())
    return plain, flash


def inputs(
    module: nn.MultiheadAttention, layout: str, rows: int, columns: int, kind: str = "own keys"
) -> tuple[list[Tensor], Sizes]:
    """Query, key, value: the same tensor three times, or keys that are values, or three tensors."""
    sizes = Sizes(1 if layout == "one sample" else BATCH, rows, columns, layout == "one sample")

    def tensor(length: int, width: int) -> Tensor:
        shapes = {
            "batch first": (BATCH, length, width),
            "sequence first": (length, BATCH, width),
            "one sample": (length, width),
        }
        return torch.randn(shapes[layout], dtype=module.out_proj.weight.dtype, requires_grad=True)

    query = tensor(rows, EMBED_DIM)
    if kind == "self":
        return [query, query, query], sizes
    key = tensor(columns, module.kdim)
    return [query, key, key if kind == "memory" else tensor(columns, module.vdim)], sizes


def results(module: Any, tensors: list[Tensor], **options: Any) -> list[Tensor]:
    """Output, weights if there are any, and the gradients of inputs and parameters."""
    outputs = [t for t in module(*tensors, **options) if t is not None]
    torch.manual_seed(1)
    # Not randn_like, which draws in the order of the memory: torch returns a transposed view.
    cotangents = [torch.randn(t.shape, dtype=t.dtype) for t in outputs]
    wanted = [*dict.fromkeys(tensors), *(module.parameters() if isinstance(module, nn.Module) else ())]
    return [*outputs, *torch.autograd.grad(outputs, wanted, cotangents)]


def assert_same(actual: list[Tensor], expected: list[Tensor], dtype: torch.dtype = torch.float64) -> None:
    assert len(actual) == len(expected)
    for ours, theirs in zip(actual, expected, strict=True):
        if dtype == torch.bfloat16:  # which rounds each of some hundred products in an element: relative to the whole
            assert (ours - theirs).norm() <= 0.02 * theirs.norm() + 1e-3
        else:
            torch.testing.assert_close(ours, theirs, equal_nan=True, **TOLERANCES[dtype])


class Recorder(Sdpa):
    """Remembers what it was called with."""

    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []

    def __call__(self, call: AttentionCall) -> Tensor:
        self.calls.append(call)
        return super().__call__(call)


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


def test_an_unknown_backend_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ValueError, match=r"backend='flahs'; did you mean 'flash'\? Allowed: 'sdpa', .*'flex'"):
        FlashMultiheadAttention(EMBED_DIM, NUM_HEADS, backend="flahs")


def test_a_backend_that_does_not_work_here_is_refused_when_called() -> None:
    attn = FlashMultiheadAttention(EMBED_DIM, NUM_HEADS, backend="fa3")
    x = torch.randn(5, 2, EMBED_DIM)

    with pytest.raises(ValueError, match=r"backend='fa3'\) does not work here: runs on NVIDIA and AMD GPUs"):
        attn(x, x, x, need_weights=False)


def test_another_backend_computes_the_same() -> None:
    plain, _ = pair(torch.float32, batch_first=True)
    flash = FlashMultiheadAttention(EMBED_DIM, NUM_HEADS, batch_first=True, backend="flash")
    flash.load_state_dict(plain.state_dict())
    tensors, _ = inputs(plain, "batch first", 5, 7)

    actual, expected = (results(m, tensors, need_weights=False) for m in (flash, plain))
    assert_same(actual, expected, torch.float32)


@pytest.mark.parametrize("options", OPTIONS)
def test_the_state_dict_fits_both_ways(options: str) -> None:
    plain, flash = pair(**OPTIONS[options])

    assert list(flash.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(flash.state_dict())


def test_the_same_seed_makes_the_same_weights() -> None:
    torch.manual_seed(3)
    plain = nn.MultiheadAttention(EMBED_DIM, NUM_HEADS, 0.1, True, True)
    torch.manual_seed(3)
    flash = FlashMultiheadAttention(EMBED_DIM, NUM_HEADS, 0.1, True, True)

    assert all(map(torch.equal, flash.parameters(), plain.parameters()))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_copy_is_a_module_of_its_own(copied: Callable[[nn.Module], nn.Module]) -> None:
    flash = FlashMultiheadAttention(EMBED_DIM, NUM_HEADS, backend="flash")
    x = torch.randn(5, 2, EMBED_DIM)
    twin: Any = copied(flash)

    assert twin.backend == "flash"
    torch.testing.assert_close(twin(x, x, x, need_weights=False)[0], flash(x, x, x, need_weights=False)[0])
    with torch.no_grad():
        twin.out_proj.bias.add_(1)
    assert not torch.equal(twin.out_proj.bias, flash.out_proj.bias)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("masks", ["no mask", "bool mask and padding", "causal"])
def test_compiled_in_one_graph(masks: str, need_weights: bool) -> None:
    torch._dynamo.reset()
    plain, flash = pair(batch_first=True)
    tensors, sizes = inputs(plain, "batch first", 5, 7)
    kwargs = {**MASKS[masks](sizes), "need_weights": need_weights}

    def call(*tensors: Tensor) -> Any:
        return flash(*tensors, **kwargs)

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    actual = [t for t in compiled(*tensors) if t is not None]
    gradients = torch.autograd.grad(actual[0].sum(), tensors)
    expected = [t for t in plain(*tensors, **kwargs) if t is not None]
    assert_same([*actual, *gradients], [*expected, *torch.autograd.grad(expected[0].sum(), tensors)])


def test_nested_tensors_go_the_way_of_torch() -> None:
    plain = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    flash = FlashMultiheadAttention(8, 2, batch_first=True).eval()
    flash.load_state_dict(plain.state_dict())
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")  # nested tensors are a prototype
        x = torch.nested.nested_tensor([torch.randn(4, 8), torch.randn(6, 8)])
        actual, expected = (m(x, x, x, need_weights=False)[0].to_padded_tensor(0.0) for m in (flash, plain))

    torch.testing.assert_close(actual, expected)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_scripted_and_traced() -> None:
    plain, flash = pair(torch.float32, batch_first=True)
    x = torch.randn(2, 5, EMBED_DIM)
    expected = plain(x, x, x)[0]

    torch.testing.assert_close(torch.jit.script(flash)(x, x, x)[0], expected)
    torch.testing.assert_close(torch.jit.trace(flash, (x, x, x), check_trace=False)(x, x, x)[0], expected)


def layers(root: nn.Module) -> list[tuple[nn.Module, str]]:
    return [
        (parent, name)
        for parent in root.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.MultiheadAttention)
    ]


def swapped(model: nn.Module) -> nn.Module:
    """A copy of ``model`` with our module in place of each of torch's."""
    model = copy.deepcopy(model)
    for parent, name in layers(model):
        old: Any = getattr(parent, name)
        new = FlashMultiheadAttention(old.embed_dim, old.num_heads, old.dropout, batch_first=old.batch_first)
        new.load_state_dict(old.state_dict())
        setattr(parent, name, new)
    return model


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_inside_a_whole_transformer(batch_first: bool, training: bool) -> None:
    transformer = nn.Transformer(16, 2, 1, 1, 24, dropout=0.0, batch_first=batch_first).train(training)
    source, target = torch.randn(3, 3, 16), torch.randn(3, 3, 16)
    causal_mask = torch.ones(3, 3, dtype=torch.bool).triu(1)
    ignored = torch.tensor([[False, False, True]] * 3)

    def outputs(model: nn.Module) -> list[Tensor]:
        out = model(
            source, target, tgt_mask=causal_mask, tgt_is_causal=True, src_key_padding_mask=ignored,
            memory_key_padding_mask=ignored,
        )  # fmt: skip
        return [out, *torch.autograd.grad(out.square().sum(), list(model.parameters()))]

    assert_same(outputs(swapped(transformer)), outputs(transformer), torch.float32)


@pytest.mark.parametrize("layer", [nn.TransformerEncoderLayer, nn.TransformerDecoderLayer])
def test_inside_a_layer_without_gradients(layer: Any) -> None:
    plain = layer(16, 2, 24, dropout=0.0, batch_first=True).eval()
    x = torch.randn(3, 4, 16)
    args = (x, x + 1) if layer is nn.TransformerDecoderLayer else (x,)

    with torch.inference_mode():
        torch.testing.assert_close(swapped(plain)(*args), plain(*args))


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


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_under_distributed_data_parallel() -> None:
    plain, flash = pair(batch_first=True)
    tensors, _ = inputs(plain, "batch first", 5, 5)
    ddp = DistributedDataParallel(flash)

    for module in (ddp, plain):
        module(*tensors, need_weights=False)[0].square().sum().backward()

    assert_same([p.grad for p in flash.parameters()], [p.grad for p in plain.parameters()])


def test_every_site_of_a_transformer_is_found() -> None:
    found = list(find_multihead(nn.Transformer(16, 2, 1, 1, 24, batch_first=True)))

    assert all(isinstance(site, MultiheadSite) and site.what == "nn.MultiheadAttention" for site in found)
    assert [site.site for site in found] == [
        "encoder.layers.0.self_attn",
        "decoder.layers.0.self_attn",
        "decoder.layers.0.multihead_attn",
    ]


def test_what_is_no_site_is_refused_with_a_reason() -> None:
    class Own(nn.MultiheadAttention):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    class Named(nn.MultiheadAttention):
        pass

    rebound = nn.MultiheadAttention(8, 2)
    rebound.forward = rebound.forward  # type: ignore[method-assign]
    model = nn.ModuleDict(
        {"flash": FlashMultiheadAttention(8, 2), "own": Own(8, 2), "rebound": rebound, "named": Named(8, 2)}
    )
    claims = {claim.site: claim for claim in find_multihead(model)}

    reasons = {site: claim.reason for site, claim in claims.items() if isinstance(claim, Refusal)}
    assert reasons == {
        "flash": "already fused",
        "own": "Own computes attention in a forward pass of its own",
        "rebound": "its forward pass was replaced by another's code",
    }
    assert isinstance(claims["named"], MultiheadSite)


def test_a_site_takes_the_arguments_of_forward() -> None:
    plain, _ = pair(batch_first=True)
    tensors, sizes = inputs(plain, "batch first", 5, 7)
    site = MultiheadSite("attn", plain)
    recorder = Recorder()

    out, weights = site.fused(
        recorder, nn.MultiheadAttention.forward, (*tensors, padding(sizes)), {"need_weights": False}
    )

    assert weights is None
    assert len(recorder.calls) == 1
    torch.testing.assert_close(out, plain(*tensors, padding(sizes), need_weights=False)[0])


class Block(nn.Module):
    """A user's module around a site, whose forward stands in for the dispatch of the technique."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(EMBED_DIM, NUM_HEADS)
        site = self.site = MultiheadSite("attn", self.attn)
        # A function of the package, as techniques rebind `forward` to.
        names: dict[str, Any] = {"__name__": "lightning_accel.dispatched", "site": site, "backend": Sdpa(), "seen": []}
        exec(
            "def forward(*args, **kwargs):\n"
            "    outputs = site.fused(backend, None, args, kwargs)\n"
            "    seen.append(site.judged((outputs[0], 'weights')))\n"
            "    return outputs\n",
            names,
        )
        self.attn.forward = names["forward"]  # type: ignore[method-assign]
        self.seen: list[Any] = names["seen"]


class Discarding(Block):
    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.attn(x, x, x)
        return out  # type: ignore[no-any-return]


class Reading(Block):
    def forward(self, x: Tensor) -> Any:
        out, weights = self.attn(x, x, x)
        return out, weights


def test_of_a_site_whose_weights_are_thrown_away_the_output_alone_is_judged() -> None:
    block = Discarding()
    out = block(torch.randn(5, 2, EMBED_DIM))

    assert block.seen[0] is out
    assert block.site.nothing_found() is None


def test_a_site_whose_weights_are_read_says_that_there_was_nothing_to_fuse() -> None:
    block = Reading()
    out, weights = block(torch.randn(5, 2, EMBED_DIM))

    assert weights.shape == (2, 5, 5)
    assert block.seen[0] == (out, "weights")
    assert block.site.nothing_found() == "its attention weights are asked for, and may be read"
