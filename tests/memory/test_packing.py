"""The codecs give back every bit, in the layout it had: over dtypes, shapes, strides, densities and strange values."""

from __future__ import annotations

import itertools
import math

import pytest

pytest.importorskip("hypothesis")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_accel.memory import bitpacking as words_module
from lightning_accel.memory.packing import (
    PACKABLE,
    Layout,
    is_packable,
    pack_above_zero,
    pack_bits,
    pack_nonzeros,
    pack_two_valued,
    sample,
)

pytestmark = pytest.mark.numbers

WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
SPECIAL = [0.0, -0.0, 1.0, -1.0, math.nan, -math.nan, math.inf, -math.inf, 1e-40, -1e-40, 5e-324, 1e-5, 3e4]

dtypes = st.sampled_from(sorted(PACKABLE - {torch.bool}, key=str))
shapes = st.lists(st.integers(0, 9), max_size=4)
densities = st.sampled_from([0.0, 0.01, 0.1, 0.5, 0.9, 1.0])
seeds = st.integers(0, 2**31)

quick = settings(max_examples=150, deadline=None)


def dense(shape: list[int], dtype: torch.dtype, density: float, seed: int) -> Tensor:
    """A tensor of random bits, NaNs with payloads among them, its dimensions in a random order of strides."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(shape), generator=generator).tolist()
    word = WORDS[dtype.itemsize]
    info = torch.iinfo(word)
    laid_out = [shape[axis] for axis in order]
    words = torch.randint(info.min, info.max, laid_out, dtype=word, generator=generator)
    words[torch.rand(laid_out, generator=generator) >= density] = 0
    return words.permute([order.index(axis) for axis in range(len(shape))]).view(dtype)


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    assert (actual.dtype, actual.shape, actual.device) == (expected.dtype, expected.shape, expected.device)
    assert actual.stride() == expected.stride()
    word = WORDS[expected.element_size()]
    assert torch.equal(actual.view(word), expected.view(word))


# -- round trips -----------------------------------------------------------------------------------------------------


@quick
@given(shapes, dtypes, densities, seeds)
def test_a_sparse_tensor_comes_back_bit_by_bit(shape: list[int], dtype: torch.dtype, density: float, seed: int) -> None:
    tensor = dense(shape, dtype, density, seed)
    packed = pack_nonzeros(tensor, max_bytes=1e9)
    assert packed is not None
    assert_same_bits(packed.unpack(), tensor)
    nonzero = int((tensor.view(WORDS[dtype.itemsize]) != 0).sum())
    assert packed.nbytes == (tensor.numel() + 7) // 8 + nonzero * dtype.itemsize


@quick
@given(st.lists(st.sampled_from(SPECIAL), max_size=40), st.sampled_from(FLOATS))
def test_negative_zeros_nans_infinities_and_subnormals_come_back(values: list[float], dtype: torch.dtype) -> None:
    tensor = torch.tensor(values, dtype=torch.float64).to(dtype)
    packed = pack_nonzeros(tensor, max_bytes=1e9)
    assert packed is not None
    assert_same_bits(packed.unpack(), tensor)


@quick
@given(shapes, densities, seeds)
def test_a_mask_comes_back_from_an_eighth_of_its_bytes(shape: list[int], density: float, seed: int) -> None:
    mask = dense(shape, torch.int8, density, seed) != 0
    packed = pack_bits(mask)
    assert_same_bits(packed.unpack(), mask)
    assert packed.nbytes == (mask.numel() + 7) // 8


@quick
@given(shapes, dtypes, densities, seeds, st.data())
def test_a_tensor_of_zeros_and_one_other_value_comes_back_from_its_bits(
    shape: list[int], dtype: torch.dtype, density: float, seed: int, data: st.DataObject
) -> None:
    word = WORDS[dtype.itemsize]
    value = data.draw(st.integers(torch.iinfo(word).min, torch.iinfo(word).max).filter(bool))
    tensor = ((dense(shape, word, density, seed) != 0) * torch.tensor(value, dtype=word)).view(dtype)
    packed = pack_two_valued(tensor, value)
    assert packed is not None
    assert_same_bits(packed.unpack(), tensor)
    assert packed.nbytes == (tensor.numel() + 7) // 8


def test_a_third_value_is_not_lost() -> None:
    tensor = torch.tensor([0.0, 2.0, 2.0, 0.0, -0.0])
    word = int(torch.tensor(2.0).view(torch.int32))
    assert pack_two_valued(tensor[:4], word) is not None
    assert pack_two_valued(tensor, word) is None


@quick
@given(st.lists(st.sampled_from(SPECIAL), min_size=1, max_size=40), st.sampled_from(FLOATS))
def test_what_is_kept_of_a_relu_lets_the_very_same_gradients_pass(values: list[float], dtype: torch.dtype) -> None:
    x = torch.tensor(values, dtype=torch.float64).to(dtype).requires_grad_()
    result = x.relu()
    (expected,) = torch.autograd.grad(result.sum(), x)
    mask = pack_above_zero(result.detach()).unpack()
    assert_same_bits(mask, expected)
    assert_same_bits(torch.ops.aten.threshold_backward(torch.ones_like(mask), mask, 0), expected)


@pytest.mark.parametrize("numel", [1, 7, 8, 9, 2**17, 2**17 + 1, 3 * 2**17 - 3])
def test_pieces_meet_without_a_seam(numel: int) -> None:
    tensor = torch.randn(numel).relu().bfloat16()
    packed = pack_nonzeros(tensor, max_bytes=1e9)
    assert packed is not None
    assert_same_bits(packed.unpack(), tensor)
    assert_same_bits(pack_bits(tensor != 0).unpack(), tensor != 0)


def test_unpacking_twice_gives_two_tensors() -> None:
    packed = pack_bits(torch.ones(8, dtype=torch.bool))
    first, second = packed.unpack(), packed.unpack()
    first.zero_()
    assert second.all()


# -- what runs on a GPU ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("piece", [8, 64, 1 << 24])
def test_the_torch_operators_pack_as_numpy_does(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words_module._Torch, "piece", piece)
    for shape, dtype, density in itertools.product(([0], [1], [8], [3, 67]), WORDS.values(), (0.0, 0.3, 1.0)):
        words = dense(shape, dtype, density, seed=1).flatten()
        expected = words_module.split_words(words, 1000)
        assert expected is not None
        with monkeypatch.context() as on_gpu:
            on_gpu.setattr(words_module, "_library", lambda words: words_module._Torch)
            found = words_module.split_words(words, 1000)
            assert found is not None
            assert torch.equal(found[0], expected[0])
            assert torch.equal(found[1], expected[1])
            joined = torch.full_like(words, 77)
            words_module.join_words(joined, *found)
            assert torch.equal(joined, words)
            assert torch.equal(words_module.mask_bits(words, lambda words: words != 0), expected[0])
            words_module.fill_words(joined, expected[0], -5)
            assert torch.equal(joined, torch.where(words != 0, -5, 0).to(dtype))
            assert words_module.split_words(words, int((words != 0).sum()) - 1) is None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", sorted(PACKABLE - {torch.bool}, key=str), ids=str)
@pytest.mark.parametrize("density", [0.0, 0.1, 0.5, 1.0])
def test_a_gpu_packs_as_a_cpu_does(dtype: torch.dtype, density: float) -> None:
    tensor = dense([3, 1001, 70], dtype, density, seed=2)
    packed = pack_nonzeros(tensor.cuda(), max_bytes=1e9)
    expected = pack_nonzeros(tensor, max_bytes=1e9)
    assert packed is not None
    assert expected is not None
    assert packed.nbytes == expected.nbytes
    assert torch.equal(packed.bits.cpu(), expected.bits)
    assert_same_bits(packed.unpack(), tensor.cuda())
    mask = tensor.view(WORDS[dtype.itemsize]) != 0
    assert_same_bits(pack_bits(mask.cuda()).unpack(), mask.cuda())


@pytest.mark.gpu
def test_a_gpu_waits_once_to_pack_and_never_to_unpack() -> None:
    tensor = torch.randn(1 << 20, device="cuda").relu()
    packed = pack_nonzeros(tensor, max_bytes=1e9)
    assert packed is not None
    mask = pack_bits(tensor > 0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        packed.unpack()
        mask.unpack()
        pack_bits(tensor > 0)
        pack_above_zero(tensor)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# -- sizes and samples -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_tensor_of_one_in_ten_takes_a_third_of_its_bytes_at_most(dtype: torch.dtype) -> None:
    tensor = dense([400, 1000], dtype, 0.1, seed=3)
    packed = pack_nonzeros(tensor, max_bytes=1e9)
    assert packed is not None
    assert 3 * packed.nbytes <= tensor.nbytes


def test_a_result_over_its_limit_is_not_made() -> None:
    tensor = torch.tensor([1.0, 0.0, 0.0, 2.0])
    assert pack_nonzeros(tensor, max_bytes=9) is not None
    assert pack_nonzeros(tensor, max_bytes=8) is None
    assert pack_nonzeros(tensor, max_bytes=0) is None


@pytest.mark.parametrize("layout", ["rows", "channels_last", "whole images"])
def test_a_sample_is_not_fooled_by_the_order_of_memory(layout: str) -> None:
    x = torch.ones(64, 64, 16, 16)
    if layout == "rows":
        x[..., 0, :] = 0
        expected = 15 / 16
    elif layout == "channels_last":
        x = x.to(memory_format=torch.channels_last)
        x[:, ::2] = 0
        expected = 1 / 2
    else:
        x[::4] = 0
        expected = 3 / 4
    assert sample(x).density == pytest.approx(expected, abs=0.05)


def test_a_sample_finds_the_one_value_beside_zero() -> None:
    noise = torch.empty(10_000).bernoulli_(0.9).div_(0.9)
    assert sample(noise).word == int(torch.tensor(1 / 0.9).view(torch.int32))
    assert sample(noise * torch.linspace(1, 2, 10_000)).word is None
    assert sample(torch.zeros(10_000)).word is None
    assert sample(torch.ones(3)).density == 1


# -- what is packed --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.zeros(4, 6), True),
        (torch.zeros(4, 6).t(), True),
        (torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last), True),
        (torch.zeros(4, 6)[1:3], True),
        (torch.zeros(4, 1, 6).transpose(0, 1), True),
        (torch.zeros(()), True),
        (torch.zeros(0, 3), True),
        (torch.zeros(4, 6)[:, 1:], False),
        (torch.zeros(4, 6)[::2], False),
        (torch.zeros(1, 6).expand(4, 6), False),
        (torch.zeros(4, 6).unfold(1, 3, 1), False),
        (torch.zeros(4, dtype=torch.complex64), False),
        (torch.zeros(4, dtype=torch.complex64).conj().imag, False),
    ],
)
def test_dense_real_tensors_are_packable_and_nothing_else(tensor: Tensor, expected: bool) -> None:
    assert is_packable(tensor) is expected


def test_a_dense_view_is_packed_from_its_own_part_of_the_storage() -> None:
    whole = torch.arange(24.0).view(4, 6)
    part = whole[1:3]
    packed = pack_nonzeros(part, max_bytes=1e9)
    assert packed is not None
    back = packed.unpack()
    assert_same_bits(back, part)
    assert back.untyped_storage().nbytes() == part.nbytes


def test_strides_of_dimensions_of_one_element_are_kept() -> None:
    tensor = torch.randn(4).as_strided((4, 1, 1), (1, 7, 3))
    packed = pack_nonzeros(tensor, max_bytes=1e9)
    assert packed is not None
    assert packed.layout == Layout.of(tensor)
    assert_same_bits(packed.unpack(), tensor)
