"""Crops and flips: every result is a window, a mirror image or a resized box of the image that came in."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("hypothesis")
pytest.importorskip("scipy")

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor
from torch.nn import functional as F

from lightning_accel.data import Position, Preprocess, RandomCrop, RandomHorizontalFlip, RandomResizedCrop, Transform
from lightning_accel.data.tensor_arrays import NumpyArrays
from lightning_accel.data.transform import Boxes, Shape

pytestmark = pytest.mark.numbers

EVALUATION = Position(training=False)


def applied(transform: Transform, images: Tensor, position: Position | None = None, seed: int = 0) -> Tensor:
    result: Tensor = Preprocess([transform], seed=seed)(images, position)
    return result


def numbered_images(count: int, channels: int = 3, height: int = 6, width: int = 7) -> Tensor:
    """Images whose every pixel has a value of its own, none of them zero."""
    one = torch.arange(1, channels * height * width + 1, dtype=torch.float32).reshape(1, channels, height, width)
    return one.repeat(count, 1, 1, 1)


def corner_of(window: Tensor, padded: Tensor) -> tuple[int, int]:
    """Where in ``padded``, ``(C, H, W)``, the window was cut out."""
    _, height, width = window.shape
    places = [
        (top, left)
        for top in range(padded.shape[1] - height + 1)
        for left in range(padded.shape[2] - width + 1)
        if torch.equal(padded[:, top : top + height, left : left + width], window)
    ]
    assert len(places) == 1
    return places[0]


# -- RandomCrop --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("padding", [0, 2])
def test_every_crop_is_a_window_of_the_padded_image_and_all_windows_are_equally_likely(padding: int) -> None:
    images = numbered_images(4000)
    crops = applied(RandomCrop((4, 5), padding=padding), images)
    padded = F.pad(images[0], [padding] * 4)
    corners = [corner_of(crop, padded) for crop in crops]
    places = {(top, left): 0 for top in range(3 + 2 * padding) for left in range(3 + 2 * padding)}
    for corner in corners:
        places[corner] += 1
    assert stats.chisquare(list(places.values())).pvalue > 1e-4


def test_in_evaluation_the_crop_is_the_middle() -> None:
    images = numbered_images(3, height=8, width=12)
    assert torch.equal(applied(RandomCrop(4), images, EVALUATION), images[..., 2:6, 4:8])


def test_in_evaluation_a_crop_of_the_padded_image_s_own_size_is_the_image() -> None:
    images = numbered_images(2, height=8, width=8)
    assert torch.equal(applied(RandomCrop(8, padding=4), images, EVALUATION), images)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.float32, torch.float64])
def test_a_crop_keeps_the_dtype(dtype: torch.dtype) -> None:
    assert applied(RandomCrop(4), numbered_images(2, channels=1).to(dtype)).dtype == dtype


def test_a_crop_of_images_with_channels_last_is_that_of_the_others() -> None:
    images = torch.rand(8, 3, 9, 10)
    expected = applied(RandomCrop((5, 6), padding=1), images)
    actual = applied(RandomCrop((5, 6), padding=1), images.permute(0, 2, 3, 1))
    assert torch.equal(actual.permute(0, 3, 1, 2), expected)


@pytest.mark.parametrize("transform", [RandomCrop(9), RandomCrop((4, 12), padding=2)])
def test_a_crop_larger_than_the_image_says_both_sizes(transform: RandomCrop) -> None:
    with pytest.raises(ValueError, match=r"RandomCrop\(size=.*larger than the images, 6x7"):
        applied(transform, numbered_images(1))


@pytest.mark.parametrize("size", [0, -1, 2.0, "4", (1, 2, 3), (4,), (4, 0), True, None])
def test_a_size_that_is_none_is_refused_at_once(size: Any) -> None:
    for kind in (RandomCrop, RandomResizedCrop):
        with pytest.raises(ValueError, match=rf"{kind.__name__}\(size="):
            kind(size)


@pytest.mark.parametrize("padding", [-1, 1.5, "1", True, (1, 2)])
def test_a_padding_that_is_none_is_refused_at_once(padding: Any) -> None:
    with pytest.raises(ValueError, match=r"RandomCrop\(padding="):
        RandomCrop(4, padding=padding)


# -- RandomHorizontalFlip ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("p", "expected"), [(0, [0]), (1, [1])])
def test_flips_of_certainty(p: float, expected: list[int]) -> None:
    images = numbered_images(64)
    assert torch.equal(applied(RandomHorizontalFlip(p), images), images.flip(3) if expected == [1] else images)


def test_each_image_is_flipped_or_left_alone_and_about_p_of_them_flipped() -> None:
    images = numbered_images(2000)
    flipped = applied(RandomHorizontalFlip(0.3), images)
    mirrored = [torch.equal(one, image.flip(2)) for one, image in zip(flipped, images, strict=True)]
    untouched = [torch.equal(one, image) for one, image in zip(flipped, images, strict=True)]
    assert all(a != b for a, b in zip(mirrored, untouched, strict=True))
    assert stats.binomtest(sum(mirrored), 2000, 0.3).pvalue > 1e-4


def test_nothing_is_flipped_in_evaluation() -> None:
    images = numbered_images(4)
    assert torch.equal(applied(RandomHorizontalFlip(1), images, EVALUATION), images)


def test_rows_of_pixels_are_mirrored_with_channels_last_too() -> None:
    images = torch.rand(2, 6, 7, 3)
    assert torch.equal(applied(RandomHorizontalFlip(1), images), images.flip(2))


@pytest.mark.parametrize("crop", [1, 3, 4])
def test_a_flip_after_a_crop_to_few_pixels_still_mirrors_columns(crop: int) -> None:
    """What the axes mean is a matter of the batch that came in, not of what a crop has made of its shape."""
    images = torch.rand(2, 8, 8, 3)
    cropped = Preprocess([RandomCrop(crop)], seed=0)(images)
    both = Preprocess([RandomCrop(crop), RandomHorizontalFlip(1)], seed=0)(images)
    assert torch.equal(both, cropped.flip(2))


def test_a_flip_after_a_crop_mirrors_columns_of_images_of_two_channels() -> None:
    images = torch.rand(2, 2, 8, 8)
    cropped = Preprocess([RandomCrop(3)], seed=0)(images)
    assert torch.equal(Preprocess([RandomCrop(3), RandomHorizontalFlip(1)], seed=0)(images), cropped.flip(3))


@pytest.mark.parametrize("p", [-0.1, 1.1, "0.5", True, float("nan"), None])
def test_a_probability_that_is_none_is_refused_at_once(p: Any) -> None:
    with pytest.raises(ValueError, match=r"RandomHorizontalFlip\(p="):
        RandomHorizontalFlip(p)


# -- RandomResizedCrop -------------------------------------------------------------------------------------------------


def resized_by_torch(images: Tensor, boxes: Boxes, size: tuple[int, int]) -> Tensor:
    """Each sample's box through torch's own bilinear interpolation, in float64."""
    resized = []
    for image, *box in zip(images, *boxes, strict=True):
        top, left, height, width = map(int, box)
        part = image[None, :, top : top + height, left : left + width].double()
        resized.append(F.interpolate(part, size=size, mode="bilinear", antialias=True))
    return torch.cat(resized)


@settings(max_examples=25, deadline=None)
@given(
    image=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    size=st.tuples(st.integers(2, 40), st.integers(2, 40)),  # to a single column torch 2.13 does not interpolate rows
    seed=st.integers(0, 2**32),
    training=st.booleans(),
)
def test_a_resized_crop_is_torch_s_antialiased_interpolation_of_the_box(
    image: tuple[int, int], size: tuple[int, int], seed: int, training: bool
) -> None:
    rng = np.random.default_rng(seed)
    images = torch.from_numpy(rng.random((3, 2, *image), dtype=np.float32))
    transform = RandomResizedCrop(size)
    boxes = transform.draw(Shape(*images.shape), rng if training else None)
    actual = torch.from_numpy(transform.apply(images.numpy(), boxes, NumpyArrays()))
    torch.testing.assert_close(actual.double(), resized_by_torch(images, boxes, size), atol=1e-5, rtol=0)


@pytest.mark.parametrize("size", [(8, 8), (48, 40)])
def test_a_resized_crop_of_uint8_is_rounded_not_cut_off(size: tuple[int, int]) -> None:
    images = torch.randint(0, 256, (6, 3, 32, 24), dtype=torch.uint8)
    transform = RandomResizedCrop(size)
    boxes = transform.draw(Shape(*images.shape), np.random.default_rng(0))
    actual = torch.from_numpy(transform.apply(images.numpy(), boxes, NumpyArrays()))
    assert actual.dtype == torch.uint8
    assert (actual.double() - resized_by_torch(images, boxes, size)).abs().max() <= 0.501


def test_a_large_batch_is_resized_as_its_samples_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    images = torch.rand(7, 3, 20, 20)
    at_once = applied(RandomResizedCrop(9), images)
    monkeypatch.setattr("lightning_accel.data.geometry._CHUNK_BYTES", 1)
    assert torch.equal(applied(RandomResizedCrop(9), images), at_once)


def test_boxes_lie_within_the_image_and_obey_scale_and_ratio() -> None:
    transform = RandomResizedCrop(8, scale=(0.2, 0.5), ratio=(0.5, 2))
    boxes = transform.draw(Shape(5000, 3, 400, 600), np.random.default_rng(0))
    assert (boxes.top >= 0).all()
    assert (boxes.left >= 0).all()
    assert (boxes.top + boxes.height <= 400).all()
    assert (boxes.left + boxes.width <= 600).all()
    scale, ratio = boxes.height * boxes.width / (400 * 600), boxes.width / boxes.height
    assert 0.198 < scale.min() < scale.max() < 0.502
    assert 0.49 < ratio.min() < ratio.max() < 2.04


def test_areas_are_uniform_and_ratios_uniform_in_their_logarithm_where_every_box_fits() -> None:
    transform = RandomResizedCrop(8, scale=(0.1, 0.4), ratio=(0.5, 2))
    boxes = transform.draw(Shape(5000, 3, 1000, 1000), np.random.default_rng(0))
    area = boxes.height * boxes.width / 1e6
    assert stats.kstest(area, stats.uniform(0.1, 0.3).cdf).pvalue > 1e-4
    ratio = np.log2(boxes.width / boxes.height)
    assert stats.kstest(ratio, stats.uniform(-1, 2).cdf).pvalue > 1e-4


@pytest.mark.parametrize(("height", "width", "largest"), [(1, 300, (1, 1)), (300, 1, (1, 1)), (3, 300, (3, 4))])
def test_where_no_box_fits_the_largest_of_an_allowed_shape_is_taken(
    height: int, width: int, largest: tuple[int, int]
) -> None:
    transform = RandomResizedCrop(8, scale=(0.9, 1.0))
    boxes = transform.draw(Shape(50, 3, height, width), np.random.default_rng(0))
    assert set(zip(boxes.height.tolist(), boxes.width.tolist(), strict=True)) == {largest}


@pytest.mark.parametrize(("shape", "box"), [((20, 30), (0, 5)), ((30, 20), (5, 0))])
def test_in_evaluation_the_largest_box_in_the_middle_is_resized(shape: tuple[int, int], box: tuple[int, int]) -> None:
    images = torch.rand(2, 3, *shape)
    top, left = box
    middle = images[..., top : top + 20, left : left + 20]
    expected = F.interpolate(middle, size=(10, 10), mode="bilinear", antialias=True)
    torch.testing.assert_close(applied(RandomResizedCrop(10), images, EVALUATION), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["scale", "ratio"])
@pytest.mark.parametrize("value", [0.5, (0.5,), (0.9, 0.1), (0, 1), (-1, 1), "ab", ("a", "b"), (0.1, float("inf"))])
def test_a_range_that_is_none_is_refused_at_once(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"RandomResizedCrop\({name}="):
        RandomResizedCrop(8, **{name: value})


@pytest.mark.parametrize("transform", [RandomCrop(1), RandomHorizontalFlip(1), RandomResizedCrop(1)])
def test_images_of_one_pixel_and_batches_of_one_or_no_image_are_taken(transform: Transform) -> None:
    image = torch.full((1, 3, 1, 1), 0.5)
    assert torch.equal(applied(transform, image), image)
    assert applied(transform, image[:0]).shape == (0, 3, 1, 1)
