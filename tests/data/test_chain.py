"""A chain of transforms: joined or not, the same numbers; the same for the same place; nothing else touched."""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("hypothesis")

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_accel.data import (
    ColorJitter,
    GaussianNoise,
    Map,
    MixUp,
    Normalize,
    Position,
    Preprocess,
    RandomCrop,
    RandomErasing,
    RandomHorizontalFlip,
    RandomResizedCrop,
    SlidingWindow,
    Transform,
)

pytestmark = pytest.mark.numbers

EVALUATION = Position(training=False)
NORMALIZE = Normalize((0.4, 0.5, 0.6), (0.2, 0.3, 0.4))
STEP_DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def uint8_images(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


# -- joined into one pass ----------------------------------------------------------------------------------------------

fusible = st.lists(
    st.one_of(
        st.builds(RandomCrop, st.tuples(st.integers(5, 7), st.integers(5, 7)), padding=st.integers(1, 3)),
        st.builds(RandomHorizontalFlip, st.sampled_from([0.0, 0.5, 1.0])),
        st.just(NORMALIZE),
        st.just(Normalize((0.4, 0.5, 0.6), (0.2, 0.3, 0.4), dtype="float32")),
        st.just(RandomErasing(0.5)),
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=150, deadline=None)
@given(
    transforms=fusible,
    images_dtype=st.sampled_from([torch.uint8, torch.float16, torch.bfloat16, torch.float32, torch.float64]),
    dtype=st.sampled_from(STEP_DTYPES),
    channels_last=st.booleans(),
    is_nhwc=st.booleans(),
    count=st.integers(0, 3),
    training=st.booleans(),
    seed=st.integers(0, 2**40),
)
def test_a_joined_chain_is_the_chain_bit_for_bit(
    transforms: list[Transform],
    images_dtype: torch.dtype,
    dtype: torch.dtype,
    channels_last: bool,
    is_nhwc: bool,
    count: int,
    training: bool,
    seed: int,
) -> None:
    images = uint8_images(count, 3, 7, 6, seed=seed % 1000)
    images = images if images_dtype == torch.uint8 else (images / 255).to(images_dtype)
    images = images.permute(0, 2, 3, 1).contiguous() if is_nhwc else images
    joined, apart = (
        Preprocess(transforms, dtype=dtype, channels_last=channels_last, seed=seed, fuse=fuse)(
            {"x": images}, Position(training=training)
        )["x"]
        for fuse in (True, False)
    )
    assert joined.dtype == apart.dtype
    assert torch.equal(joined, apart)


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("is_nhwc", [True, False])
@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("dtype", STEP_DTYPES)
def test_normalised_images_have_the_step_s_dtype_and_layout(
    dtype: torch.dtype, channels_last: bool, is_nhwc: bool, fuse: bool
) -> None:
    images = uint8_images(2, 5, 7, 3) if is_nhwc else uint8_images(2, 3, 5, 7)
    for chain in ([NORMALIZE], [RandomCrop(4), NORMALIZE], [NORMALIZE, RandomHorizontalFlip(), RandomErasing()]):
        result = Preprocess(chain, dtype=dtype, channels_last=channels_last, seed=0, fuse=fuse)(images)
        assert result.dtype == dtype
        is_plain = is_nhwc or not channels_last
        assert result.is_contiguous(memory_format=torch.contiguous_format if is_plain else torch.channels_last)


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("channels_last", [True, False])
def test_the_layout_is_one_of_the_two_whatever_came_in(channels_last: bool, fuse: bool) -> None:
    layout = torch.channels_last if channels_last else torch.contiguous_format
    images = torch.rand(4, 3, 6, 5)
    for source in (
        images.transpose(2, 3),
        images.permute(3, 1, 2, 0),
        images[:, :, ::2, 1:],
        images[:1].expand(4, 3, 6, 5),
    ):
        result = Preprocess([NORMALIZE], channels_last=channels_last, fuse=fuse)(source)
        assert result.is_contiguous(memory_format=layout)


@pytest.mark.parametrize("fuse", [True, False])
def test_float32_can_be_asked_for_whatever_the_step_computes_in(fuse: bool) -> None:
    chain = Preprocess([Normalize(0.5, 0.5, dtype="float32")], dtype=torch.bfloat16, seed=0, fuse=fuse)
    assert chain(uint8_images(2, 3, 4, 4)).dtype == torch.float32


def test_a_normalisation_that_names_its_part_tells_where_the_channels_are_to_those_that_find_it() -> None:
    images = torch.rand(2, 4, 6, 3)  # of four rows, or of four channels: three means tell
    chain = Preprocess([RandomHorizontalFlip(1), Normalize((0.0, 0.0, 0.0), 1.0, key=0)])
    assert torch.equal(chain([images])[0], images.flip(2))


def test_the_layout_is_asked_for_at_each_batch() -> None:
    answers = iter([True, False])
    chain = Preprocess([NORMALIZE], channels_last=lambda: next(answers))
    assert chain(uint8_images(2, 3, 4, 4)).is_contiguous(memory_format=torch.channels_last)
    assert chain(uint8_images(2, 3, 4, 4)).is_contiguous()


@pytest.mark.parametrize(
    ("transforms", "description"),
    [
        ([RandomCrop(4), RandomHorizontalFlip(), NORMALIZE], "[RandomCrop + RandomHorizontalFlip + Normalize]"),
        ([NORMALIZE], "Normalize"),
        ([RandomCrop(4), RandomHorizontalFlip()], "RandomCrop, RandomHorizontalFlip"),
        ([RandomCrop(4), RandomCrop(3), NORMALIZE], "RandomCrop, [RandomCrop + Normalize]"),
        ([NORMALIZE, NORMALIZE], "Normalize, Normalize"),
        ([RandomCrop(4, key="a"), Normalize(0, 1, key="b")], "RandomCrop, Normalize"),
        ([ColorJitter(), NORMALIZE, RandomHorizontalFlip()], "ColorJitter, [Normalize + RandomHorizontalFlip]"),
    ],
)
def test_the_description_shows_what_is_joined(transforms: list[Transform], description: str) -> None:
    assert Preprocess(transforms).describe() == f"{description} with NumPy on cpu"
    assert "[" not in Preprocess(transforms, fuse=False).describe()


# -- randomness --------------------------------------------------------------------------------------------------------

RANDOM = [
    RandomCrop(6, padding=2),
    RandomHorizontalFlip(),
    NORMALIZE,
    RandomErasing(),
    GaussianNoise(0.1),
    MixUp(1.0, 5),
]


def random_batch(seed: int = 0, rank: int = 0, **place: int) -> Tensor:
    batch = uint8_images(8, 3, 8, 8), torch.arange(8) % 5
    result: Tensor = Preprocess(RANDOM, seed=seed, rank=rank)(batch, Position(**place))[0]  # type: ignore[arg-type]
    return result


def test_the_same_seed_and_place_give_the_same_batch_whatever_came_before() -> None:
    chain = Preprocess(RANDOM, seed=0)
    batch = uint8_images(8, 3, 8, 8), torch.arange(8) % 5
    for index in (0, 5, 1):
        chain(batch, Position(batch_idx=index))
    assert torch.equal(chain(batch, Position(batch_idx=3))[0], random_batch(batch_idx=3))


@pytest.mark.parametrize("other", [{"seed": 1}, {"rank": 1}, {"epoch": 1}, {"batch_idx": 1}, {"loader_idx": 1}])
def test_another_seed_rank_or_place_gives_another_batch(other: dict[str, int]) -> None:
    assert not torch.equal(random_batch(), random_batch(**other))


def test_global_generators_have_no_say_and_are_left_alone() -> None:
    before = random_batch()
    torch.manual_seed(99), np.random.seed(99), random.seed(99)
    states = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    assert torch.equal(random_batch(), before)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (np.random.get_state()[1].tolist(), random.getstate()) == states[1:]


def test_without_a_seed_it_is_that_of_torch() -> None:
    torch.manual_seed(7)
    torch.rand(3)
    batch = uint8_images(8, 3, 8, 8)
    without, given_seed = Preprocess([RandomHorizontalFlip()]), Preprocess([RandomHorizontalFlip()], seed=7)
    assert torch.equal(without(batch), given_seed(batch))


# -- the user's batch --------------------------------------------------------------------------------------------------


def test_what_is_no_tensor_stays_the_object_that_it_is() -> None:
    own = {"name": "a", "none": None, "array": np.zeros((2, 2)), "object": object(), "set": {1}, "bytes": b"x"}
    result = Preprocess([RandomHorizontalFlip(), NORMALIZE, Map(lambda xp, batch: batch)])(
        {**own, "nested": [own["array"], 3], "image": uint8_images(2, 3, 4, 4)}
    )
    assert all(result[key] is own[key] or result[key] == own[key] for key in own if key != "array")
    assert result["array"] is own["array"] is result["nested"][0]


def test_parts_that_no_transform_acts_on_stay_the_same_tensors() -> None:
    label, weights = torch.arange(2), torch.rand(5, requires_grad=True)
    result = Preprocess([NORMALIZE])((uint8_images(2, 3, 4, 4), label, {"w": weights}))
    assert result[1] is label
    assert result[2]["w"] is weights


@pytest.mark.parametrize(
    "transform", [RandomHorizontalFlip(1), RandomCrop(4), Map(lambda xp, x: x)], ids=["flip", "crop", "map"]
)
def test_images_of_bfloat16_stay_bfloat16(transform: Transform) -> None:
    assert Preprocess([transform])(torch.rand(2, 3, 4, 4).bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("fuse", [True, False])
def test_inputs_of_every_kind_of_memory_give_the_same(fuse: bool) -> None:
    """Without gaps, with them, transposed, of one value, needing gradients, made for inference, not to be written."""
    plain = torch.rand(4, 3, 6, 6)
    with torch.inference_mode():
        inference = plain.clone()
    padded = torch.zeros(4, 3, 8, 9)[..., 1:7, 2:8].copy_(plain)
    chain = Preprocess([RandomCrop(6, padding=1), NORMALIZE, RandomHorizontalFlip()], seed=0, fuse=fuse)
    expected = chain(plain)
    transposed = plain.transpose(2, 3).contiguous().transpose(2, 3)
    for images in (
        plain.clone().requires_grad_(),
        inference,
        padded,
        transposed,
        plain.to(memory_format=torch.channels_last),
    ):
        result = chain(images)
        assert torch.equal(result, expected)
        assert not result.requires_grad
    assert torch.equal(chain(plain[:1, :1, :1, :1].expand(4, 3, 6, 6)), chain(plain[0, 0, 0, 0].repeat(4, 3, 6, 6)))
    with torch.inference_mode():
        assert torch.equal(chain(plain), expected)
    frozen = plain.numpy().copy()
    frozen.flags.writeable = False
    result = Preprocess([Map(lambda xp, x: np.broadcast_to(x[:1], x.shape), key=0)])((plain, frozen))
    assert result[1] is frozen
    result[0][0] = 7  # a tensor that may be written to: its samples are not one
    assert torch.equal(result[0][1], plain[0])


@pytest.mark.parametrize("shape", [(0, 3, 6, 6), (1, 3, 6, 6), (1, 3, 1, 1)])
def test_batches_of_one_and_of_no_sample_and_images_of_one_pixel_go_through(shape: tuple[int, ...]) -> None:
    size = shape[2]
    transforms = [ColorJitter(0.1, 0.1, 0.1, 0.1), RandomResizedCrop(size), RandomCrop(size), *RANDOM[1:]]
    images, labels = Preprocess(transforms, seed=0)((uint8_images(*shape), torch.zeros(shape[0]).long()))
    assert images.shape == shape
    assert labels.shape == (shape[0], 5)


# -- after a Map -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("channels_last", [True, False])
def test_a_function_may_move_what_was_normalised(channels_last: bool, fuse: bool) -> None:
    """The step's dtype and layout are for the images, wherever they now are, and for nothing that took their place."""
    chain = [NORMALIZE, Map(lambda xp, pair: (pair[1], pair[0]))]
    preprocess = Preprocess(chain, dtype=torch.bfloat16, channels_last=channels_last, seed=0, fuse=fuse)
    label, image = preprocess((uint8_images(2, 3, 4, 4), torch.tensor([1, 257])))
    assert label.dtype == torch.int64
    assert label.tolist() == [1, 257]
    assert image.dtype.is_floating_point


@pytest.mark.parametrize(
    "fn",
    [
        lambda xp, pair: (pair[0].reshape(2, -1), pair[1]),
        lambda xp, pair: (None, pair[1]),
        lambda xp, pair: {"count": pair[0]},
        lambda xp, pair: [pair[1]],
    ],
    ids=["flattened", "removed", "renamed", "left out"],
)
def test_a_function_may_make_something_else_of_what_was_normalised(fn: Any) -> None:
    Preprocess([NORMALIZE, Map(fn)], channels_last=True)((uint8_images(2, 3, 4, 4), torch.arange(2)))


def test_windows_of_normalised_images_are_given_the_step_s_dtype() -> None:
    chain = Preprocess([NORMALIZE, SlidingWindow(2)], dtype=torch.bfloat16, channels_last=True)
    assert chain(uint8_images(2, 3, 4, 4)).shape == (2, 2, 2, 4, 4)


def test_what_is_no_transform_is_refused_with_what_to_do() -> None:
    with pytest.raises(TypeError, match=r"of type function.*a function of your own goes into Map"):
        Preprocess([lambda batch: batch])  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"Preprocess\(dtype=torch.float64\): allowed"):
        Preprocess([], dtype=torch.float64)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (Normalize(0.5, 0.5), r"Allowed: a list of transforms, such as \[Normalize"),
        ([RandomHorizontalFlip], r"is a class: write RandomHorizontalFlip\(\.\.\.\)"),
        (["RandomHorizontalFlip"], r"in YAML {class_path: "),
    ],
    ids=["one", "class", "name"],
)
def test_what_is_no_list_of_transforms_is_answered_with_what_to_write(given: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        Preprocess(given)
